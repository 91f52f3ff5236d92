"""The operations that cost time, each with a plain PyTorch meaning (in `core`) and a fast twin in Triton.

Methods call these; which twin runs is decided here, by device, dtype and shape. The Triton twins serve CUDA
tensors without gradient and never change what is computed, only how.
"""

import torch
from torch import Tensor

from ..core import attention, criteria, matching
from ..core.assignment import Assignment

__all__ = ["attend", "attend_and_look", "informativeness", "match", "pool", "pool_both"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sizes: Tensor | None,
    scale: float,
    dropout: float = 0.0,
    spread: Assignment | None = None,
) -> Tensor:
    """Proportional attention with joined heads, B N (H d); see `core.attention.attend`."""
    return attention.attend(q, k, v, sizes=sizes, scale=scale, dropout=dropout, spread=spread)


def informativeness(q: Tensor, k: Tensor, *, sizes: Tensor | None, scale: float, rows: str) -> Tensor:
    """Attention each token receives, B N; see `core.attention.informativeness`."""
    return attention.informativeness(q, k, sizes=sizes, scale=scale, rows=rows)


def attend_and_look(
    q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, scale: float, rows: str, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Both of the above at once: context B N (H d) and informativeness B N."""
    context = attention.attend(q, k, v, sizes=sizes, scale=scale, dropout=dropout)
    return context, attention.informativeness(q, k, sizes=sizes, scale=scale, rows=rows)


@torch.no_grad()
def match(
    x: Tensor,
    informativeness: Tensor,
    sizes: Tensor | None,
    taus: criteria.Criteria,
    *,
    r: int,
    protected: int,
    bidirectional: bool,
) -> Assignment:
    """Which tokens become one, by the criteria; see `core.criteria.attraction` and `core.matching`."""
    scores = criteria.attraction(x, informativeness, sizes, taus, protected=protected)
    by = matching.match_bidirectional if bidirectional else matching.match_one_way
    return by(scores, r, protected=protected)


def pool(x: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
    """Weighted mean over each slot, B N C -> B M C; see `Assignment.pool`."""
    return assignment.pool(x, weights)


def pool_both(
    x: Tensor, y: Tensor, weights: Tensor, sizes: Tensor, assignment: Assignment
) -> tuple[Tensor, Tensor, Tensor]:
    """Two tensors pooled alike, and the sizes of the slots."""
    return assignment.pool(x, weights), assignment.pool(y, weights), assignment.total(sizes)
