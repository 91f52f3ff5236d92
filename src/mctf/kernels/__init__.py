"""The operations that cost time, each with a plain PyTorch meaning (in `core`) and a fast twin in Triton.

Methods call these; which twin runs is decided here, by device, dtype and shape. The twins compute the same, only
faster: they serve CUDA tensors wherever Triton is installed, and the plain versions serve everything else. Set the
environment variable MCTF_KERNELS=0 to do without them.
"""

import torch
from torch import Tensor

from ..core import attention, matching
from ..core.assignment import Assignment, joint_weights
from ..core.attention import ReceivedAttention
from . import attention as attention_ops
from . import launch
from . import matching as matching_ops
from . import pooling as pooling_ops
from .launch import plain_operations

__all__ = [
    "attend",
    "attend_with_received",
    "attention_received",
    "fuse_both",
    "fuse_tokens",
    "match",
    "plain_operations",
    "pool",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fast(x: Tensor) -> bool:
    """Whether the Triton twins can serve this tensor."""
    return launch.wanted and (x.is_cuda or launch.INTERPRETED) and x.dtype in _DTYPES


def _fast_attention(q: Tensor, v: Tensor | None = None, *, dropout: float = 0.0, bias: Tensor | None = None) -> bool:
    alike = v is None or v.dtype == q.dtype  # not so where autocast leaves normalised queries in float32
    return fast(q) and alike and dropout == 0 and bias is None and attention_ops.fits(q)


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
    bias: Tensor | None = None,
    unpool: Assignment | None = None,
    received: ReceivedAttention | None = None,
) -> Tensor:
    """Proportional attention with joined heads, B N (H d); see `core.attention.attend`."""
    if _fast_attention(q, v, dropout=dropout, bias=bias) and (sizes is not None or unpool is not None):
        train = _training(q, k, v)
        slots = None if unpool is None else unpool.slots
        members = unpool.members() if train and unpool is not None else (None, None)
        return attention_ops.attention(q, k, v, sizes, slots, *members, scale, 0.0, 0.0, False, train)[0]
    return attention.attend(
        q, k, v, sizes=sizes, scale=scale, dropout=dropout, bias=bias, unpool=unpool, received=received
    )


def attention_received(
    q: Tensor,
    k: Tensor,
    *,
    sizes: Tensor | None,
    scale: float,
    rows: str,
    bias: Tensor | None = None,
    keep: bool = False,
) -> ReceivedAttention:
    """Attention each token receives; see `core.attention.attention_received`."""
    if _fast_attention(q, bias=bias):
        weights = _ROW_WEIGHTS[rows]
        with torch.no_grad():
            outputs = attention_ops.attention(q, k, None, sizes, None, None, None, scale, *weights, True, False)
        return ReceivedAttention(outputs[1])
    return attention.attention_received(q, k, sizes=sizes, scale=scale, rows=rows, bias=bias, keep=keep)


def attend_with_received(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sizes: Tensor | None,
    scale: float,
    rows: str,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Both of the above from one pass: context B N (H d), and attention received in partial sums, B G N."""
    if _fast_attention(q, v, dropout=dropout, bias=bias):
        weights = _ROW_WEIGHTS[rows]
        train = _training(q, k, v)
        return attention_ops.attention(q, k, v, sizes, None, None, None, scale, *weights, True, train)[:2]
    if fast(q) and bias is None:
        context = attend(q, k, v, sizes=sizes, scale=scale, dropout=dropout)
        return context, attention_received(q, k, sizes=sizes, scale=scale, rows=rows).partial
    context, received = attention.attend_with_received(
        q, k, v, sizes=sizes, scale=scale, rows=rows, dropout=dropout, bias=bias
    )
    return context, received[:, None]


@torch.no_grad()
def match(
    x: Tensor,
    received: Tensor,
    sizes: Tensor | None,
    taus: matching.Criteria,
    *,
    r: int,
    protected: int,
    bidirectional: bool,
) -> tuple[Assignment, Tensor]:
    """Which tokens become one, by the criteria, and their informativeness: the sum of `received` (B G N), B N, above 0.

    See `core.matching.pair_scores` and `core.matching`.
    """
    if fast(x) and matching_ops.fits(x.shape[1], protected):
        temperatures = (float(taus.tau_sim), float(taus.tau_info), float(taus.tau_size))
        slots, order, start, a = matching_ops.match(x, received, sizes, r, protected, *temperatures, bidirectional)
        return Assignment(slots, x.shape[1] - r, order, start), a
    a = matching.total_received(received)
    scores = matching.pair_scores(x, a, sizes, taus, protected=protected)
    by = matching.match_bidirectional if bidirectional else matching.match_one_way
    return by(scores, r, protected=protected), a


def pool(x: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
    """Weighted mean over each slot, B N C -> B M C; see `Assignment.pool`."""
    if fast(x):
        return _pool(x, None, weights, None, assignment, by_size=False)[0]
    return assignment.pool(x, weights)


def fuse_tokens(
    x: Tensor, weights: Tensor | None, sizes: Tensor | None, assignment: Assignment, *, by_size: bool
) -> tuple[Tensor, Tensor]:
    """The tokens of each slot become one: their mean, B M C, and their sizes added up, B M.

    A token counts by its weight and, `by_size`, as often as it stands for others. Without weights or sizes all are 1.
    """
    if fast(x):
        x, _, totals = _pool(x, None, weights, sizes, assignment, by_size=by_size)
        return x, totals
    joint, counts = _plain_weights(weights, sizes, x, by_size)
    return assignment.pool(x, joint), assignment.total(counts)


def fuse_both(
    x: Tensor, y: Tensor, weights: Tensor | None, sizes: Tensor | None, assignment: Assignment, *, by_size: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`fuse_tokens` of two tensors alike: their means and the sizes of the slots."""
    if fast(x) and fast(y):
        return _pool(x, y, weights, sizes, assignment, by_size=by_size)
    joint, counts = _plain_weights(weights, sizes, x, by_size)
    return assignment.pool(x, joint), assignment.pool(y, joint), assignment.total(counts)


def _pool(
    x: Tensor, y: Tensor | None, weights: Tensor | None, sizes: Tensor | None, assignment: Assignment, *, by_size: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """By the kernel: means of x and of y, if given, and the sizes of the slots."""
    train = _training(x) if y is None else _training(x, y)
    x_mean, y_mean, totals, _ = pooling_ops.pool(
        x, y, weights, sizes, by_size, assignment.slots, *assignment.members(), train
    )
    return x_mean, y_mean, totals


def _plain_weights(weights: Tensor | None, sizes: Tensor | None, x: Tensor, by_size: bool) -> tuple[Tensor, Tensor]:
    """How much each token of x counts in its slot, and how many it stands for: both B N."""
    counts = matching.at_least_float32(torch.ones_like(x[..., 0])) if sizes is None else sizes
    return joint_weights(weights, counts, by_size), counts
