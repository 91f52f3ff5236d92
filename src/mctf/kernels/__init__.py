"""The operations that cost time, each with a plain PyTorch meaning (in `core`) and a fast twin in Triton.

Methods call these; which twin runs is decided here, by device, dtype and shape. The twins compute the same, only
faster: they serve CUDA tensors wherever Triton is installed, and the plain versions serve everything else. Set the
environment variable MCTF_KERNELS=0 to do without them.
"""

import torch
from torch import Tensor

from ..core import attention, criteria, matching
from ..core.assignment import Assignment
from . import attention_op, launch, matching_op, pooling_op
from .launch import plain_operations

__all__ = ["attend", "attend_and_look", "informativeness", "match", "plain_operations", "pool", "pool_both"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fast(x: Tensor) -> bool:
    """Whether the Triton twins can serve this tensor."""
    return launch.wanted and (x.is_cuda or launch.INTERPRETED) and x.dtype in _DTYPES


def _fast_attention(q: Tensor, v: Tensor | None = None, dropout: float = 0.0) -> bool:
    alike = v is None or v.dtype == q.dtype  # not so where autocast leaves normalised queries in float32
    return fast(q) and alike and dropout == 0 and attention_op.fits(q)


def _training(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


# Weight of the mean over all attention rows, and of the first row, in informativeness.
_ROW_WEIGHTS = {"mean": (1.0, 0.0), "class": (0.0, 1.0), "both": (0.5, 0.5)}


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
    if _fast_attention(q, v, dropout) and (sizes is not None or spread is not None):
        train = _training(q, k, v)
        slots = None if spread is None else spread.slots
        members = spread.members() if train and spread is not None else (None, None)
        return attention_op.attention(q, k, v, sizes, slots, *members, scale, 0.0, 0.0, False, train)[0]
    return attention.attend(q, k, v, sizes=sizes, scale=scale, dropout=dropout, spread=spread)


@torch.no_grad()
def informativeness(q: Tensor, k: Tensor, *, sizes: Tensor | None, scale: float, rows: str) -> Tensor:
    """Attention each token receives, B N; see `core.attention.informativeness`."""
    if _fast_attention(q):
        weights = _ROW_WEIGHTS[rows]
        return attention_op.attention(q, k, None, sizes, None, None, None, scale, *weights, True, False)[1].sum(1)
    return attention.informativeness(q, k, sizes=sizes, scale=scale, rows=rows)


def attend_and_look(
    q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, scale: float, rows: str, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Both of the above at once: context B N (H d) and informativeness B N."""
    if _fast_attention(q, v, dropout):
        weights = _ROW_WEIGHTS[rows]
        train = _training(q, k, v)
        context, received, _ = attention_op.attention(q, k, v, sizes, None, None, None, scale, *weights, True, train)
        return context, received.sum(1)
    if fast(q):
        context = attend(q, k, v, sizes=sizes, scale=scale, dropout=dropout)
        return context, informativeness(q, k, sizes=sizes, scale=scale, rows=rows)
    return attention.attend_and_look(q, k, v, sizes=sizes, scale=scale, rows=rows, dropout=dropout)


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
    if fast(x) and matching_op.fits(x.shape[1], protected):
        temperatures = (float(taus.tau_sim), float(taus.tau_info), float(taus.tau_size))
        slots, order, start = matching_op.match(x, informativeness, sizes, r, protected, *temperatures, bidirectional)
        return Assignment(slots, x.shape[1] - r, order, start)
    scores = criteria.attraction(x, informativeness, sizes, taus, protected=protected)
    by = matching.match_bidirectional if bidirectional else matching.match_one_way
    return by(scores, r, protected=protected)


def pool(x: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
    """Weighted mean over each slot, B N C -> B M C; see `Assignment.pool`."""
    if fast(x):
        return pooling_op.pool(x, None, weights, None, assignment.slots, *assignment.members())[0]
    return assignment.pool(x, weights)


def pool_both(
    x: Tensor, y: Tensor, weights: Tensor, sizes: Tensor, assignment: Assignment
) -> tuple[Tensor, Tensor, Tensor]:
    """Two tensors pooled alike (B M C each), and the sizes of the slots (B M)."""
    if fast(x) and fast(y):
        return pooling_op.pool(x, y, weights, sizes, assignment.slots, *assignment.members())
    return assignment.pool(x, weights), assignment.pool(y, weights), assignment.total(sizes)
