"""The operations that cost time, each with a plain PyTorch meaning (in `core`) and a fast twin in Triton.

Methods call these; which twin runs is decided here, by device, dtype and shape. The twins compute the same, only
faster: they serve CUDA tensors wherever Triton is installed, and the plain versions serve everything else. Set the
environment variable MCTF_KERNELS=0 to do without them.
"""

import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ..core import attention, criteria, matching
from ..core.assignment import Assignment

__all__ = ["attend", "attend_and_look", "informativeness", "match", "pool", "pool_both"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@lru_cache
def _installed() -> bool:
    return find_spec("triton") is not None and os.environ.get("MCTF_KERNELS", "1") != "0"


@lru_cache
def _interpreted() -> bool:
    """Triton's interpreter runs the kernels on the CPU: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def fast(x: Tensor) -> bool:
    """Whether the Triton twins can serve this tensor."""
    return (x.is_cuda or _interpreted()) and x.dtype in _DTYPES and _installed()


def _fast_attention(q: Tensor, v: Tensor | None = None, dropout: float = 0.0) -> bool:
    training = v is not None and torch.is_grad_enabled() and (q.requires_grad or v.requires_grad)
    return fast(q) and q.shape[3] <= 128 and dropout == 0 and not training


def _row_weights(rows: str, tokens: int, heads: int) -> tuple[float, float]:
    """Weight of every attention row, and of the first row on top, in the mean that is informativeness."""
    mean, first = {"mean": (1.0, 0.0), "class": (0.0, 1.0), "both": (0.5, 0.5)}[rows]
    return mean / (tokens * heads), first / heads


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
        from .attention_op import attention as fast_attention

        slots = None if spread is None else spread.slots
        return fast_attention(q, k, v, sizes, slots, scale, 0.0, 0.0, False)[0]
    return attention.attend(q, k, v, sizes=sizes, scale=scale, dropout=dropout, spread=spread)


@torch.no_grad()
def informativeness(q: Tensor, k: Tensor, *, sizes: Tensor | None, scale: float, rows: str) -> Tensor:
    """Attention each token receives, B N; see `core.attention.informativeness`."""
    if _fast_attention(q):
        from .attention_op import attention as fast_attention

        weights = _row_weights(rows, q.shape[2], q.shape[1])
        return fast_attention(q, k, None, sizes, None, scale, *weights, True)[1].sum(1)
    return attention.informativeness(q, k, sizes=sizes, scale=scale, rows=rows)


def attend_and_look(
    q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, scale: float, rows: str, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Both of the above at once: context B N (H d) and informativeness B N."""
    if _fast_attention(q, v, dropout):
        from .attention_op import attention as fast_attention

        weights = _row_weights(rows, q.shape[2], q.shape[1])
        context, received = fast_attention(q, k, v, sizes, None, scale, *weights, True)
        return context, received.sum(1)
    context = attention.attend(q, k, v, sizes=sizes, scale=scale, dropout=dropout)
    return context, informativeness(q, k, sizes=sizes, scale=scale, rows=rows)


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
    if fast(x):
        from . import matching_op

        if matching_op.fits(x.shape[1], protected):
            temperatures = (float(taus.tau_sim), float(taus.tau_info), float(taus.tau_size))
            slots, order, start = matching_op.match(
                x, informativeness, sizes, r, protected, *temperatures, bidirectional
            )
            return Assignment(slots, x.shape[1] - r, order, start)
    scores = criteria.attraction(x, informativeness, sizes, taus, protected=protected)
    by = matching.match_bidirectional if bidirectional else matching.match_one_way
    return by(scores, r, protected=protected)


def pool(x: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
    """Weighted mean over each slot, B N C -> B M C; see `Assignment.pool`."""
    if fast(x):
        from .pooling_op import members
        from .pooling_op import pool as fast_pool

        return fast_pool(x, None, weights, None, assignment.slots, *members(assignment))[0]
    return assignment.pool(x, weights)


def pool_both(
    x: Tensor, y: Tensor, weights: Tensor, sizes: Tensor, assignment: Assignment
) -> tuple[Tensor, Tensor, Tensor]:
    """Two tensors pooled alike (B M C each), and the sizes of the slots (B M)."""
    if fast(x) and fast(y):
        from .pooling_op import members
        from .pooling_op import pool as fast_pool

        return fast_pool(x, y, weights, sizes, assignment.slots, *members(assignment))
    return assignment.pool(x, weights), assignment.pool(y, weights), assignment.total(sizes)
