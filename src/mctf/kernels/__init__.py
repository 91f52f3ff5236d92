"""The operations that cost time: attention, attention received, matching and merging.

Each has a plain PyTorch version in `core` and a Triton version here; both compute the same. This module is the only
dispatcher: by device, dtype and shape it calls the Triton version for CUDA tensors where Triton is installed, the
version for CPUs of `cpu.py` where there is one and Numba is installed, and the plain version otherwise. The environment
variable MCTF_KERNELS=0, or `disable_kernels()`, switches the kernels off.

Axes: B images, H heads, N tokens, M slots, C channels, d channels per head, G partial sums.
"""

from typing import overload

import torch
from torch import Tensor

from ..core import attention as core_attention
from ..core import clustering as core_clustering
from ..core import matching as core_matching
from ..core import portable
from ..core.assignment import Assignment, joint_weights
from ..core.attention import ReceivedAttention
from . import attention as attention_ops
from . import clustering as clustering_ops
from . import launch
from . import matching as matching_ops
from . import pooling as pooling_ops
from .launch import disable_kernels

__all__ = ["attend", "attend_with_received", "attention_received", "disable_kernels", "match", "merge"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# `rows` of informativeness -> weights of the mean over all attention rows and of the first row.
_ROW_WEIGHTS = {"mean": (1.0, 0.0), "class": (0.0, 1.0), "both": (0.5, 0.5)}


def use_kernels(x: Tensor) -> bool:
    """Whether the Triton versions serve this tensor; a batch without images has nothing to launch."""
    on_device = launch.HAS_TRITON and (x.is_cuda or launch.INTERPRETED)
    return launch.enabled and on_device and x.dtype in _DTYPES and x.shape[0] != 0


def _use_numba(x: Tensor) -> bool:
    """Whether versions compiled for a CPU serve this tensor: not in a graph nor under vmap, which give no numbers."""
    if not (launch.enabled and launch.HAS_NUMBA and x.device.type == "cpu" and type(x) is Tensor):
        return False
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return not traced and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _use_attention_kernels(
    q: Tensor, v: Tensor | None = None, *, dropout: float = 0.0, bias: Tensor | None = None
) -> bool:
    same_dtype = v is None or v.dtype == q.dtype  # autocast leaves normalized queries in float32
    return use_kernels(q) and same_dtype and dropout == 0 and bias is None and attention_ops.fits(q)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


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
    """Proportional attention with joined heads: q, k, v B H N d, sizes B N -> B N (H d); see `core.attention.attend`.

    Plain attention, without sizes and `unpool`, is left to PyTorch.
    """
    all_queries = q.shape[2] == k.shape[2]
    proportional = sizes is not None or unpool is not None
    if proportional and all_queries and _use_attention_kernels(q, v, dropout=dropout, bias=bias):
        train = _needs_grad(q, k, v)
        slots = None if unpool is None else unpool.slots
        members = unpool.members() if train and unpool is not None else (None, None)
        return attention_ops.attention(q, k, v, sizes, slots, *members, scale, 0.0, 0.0, False, train)[0]
    return core_attention.attend(
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
    """Attention each token receives, in partial sums B G N; see `core.attention.attention_received`."""
    if _use_attention_kernels(q, bias=bias):
        weights = _ROW_WEIGHTS[rows]
        with torch.no_grad():
            outputs = attention_ops.attention(q, k, None, sizes, None, None, None, scale, *weights, True, False)
        return ReceivedAttention(outputs[1])
    return core_attention.attention_received(q, k, sizes=sizes, scale=scale, rows=rows, bias=bias, keep=keep)


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
    if _use_attention_kernels(q, v, dropout=dropout, bias=bias):
        weights = _ROW_WEIGHTS[rows]
        train = _needs_grad(q, k, v)
        return attention_ops.attention(q, k, v, sizes, None, None, None, scale, *weights, True, train)[:2]
    if use_kernels(q) and bias is None:
        context = attend(q, k, v, sizes=sizes, scale=scale, dropout=dropout)
        return context, attention_received(q, k, sizes=sizes, scale=scale, rows=rows).partial
    context, received = core_attention.attend_with_received(
        q, k, v, sizes=sizes, scale=scale, rows=rows, dropout=dropout, bias=bias
    )
    return context, received[:, None]


@torch.no_grad()
def match(
    x: Tensor,
    received: Tensor,
    sizes: Tensor | None,
    criteria: core_matching.Criteria,
    *,
    r: int,
    protected: int,
    bidirectional: bool,
) -> tuple[Assignment, Tensor]:
    """The assignment of N tokens (x: B N C, sizes: B N) to N - r slots by the criteria; see `core.matching`.

    Also the informativeness of each token, B N, above 0: the sum of `received` (B G N) over G.
    """
    if use_kernels(x) and matching_ops.fits(x.shape[1], protected):
        taus = (float(criteria.tau_sim), float(criteria.tau_info), float(criteria.tau_size))
        slots, order, start, a = matching_ops.match(x, received, sizes, r, protected, *taus, bidirectional)
        return Assignment(slots, x.shape[1] - r, order, start), a
    a = core_attention.total_received(received)
    scores = core_matching.pair_scores(x, a, sizes, criteria, protected=protected)
    by = core_matching.match_bidirectional if bidirectional else core_matching.match_one_way
    return by(scores, r, protected=protected), a


@torch.no_grad()
def cluster(
    x: Tensor,
    received: Tensor | None,
    sizes: Tensor | None,
    *,
    r: int,
    protected: int,
    rounds: int,
    candidates: float,
) -> tuple[Assignment, Tensor | None, Tensor]:
    """The assignment of N tokens (x: B N C, sizes: B N) to N - r slots by Ward's cost; see `core.clustering`.

    Also the informativeness of each token, B N, above 0: the sum of `received` (B G N) over G; and its weight, B N,
    which is its size where nothing was received.
    """
    if received is None:
        a, weights = None, core_attention.at_least_float32(torch.ones_like(x[..., 0])) if sizes is None else sizes
    else:
        a = core_attention.total_received(received)
        weights = core_clustering.token_weights(a, sizes)
    if use_kernels(x) and clustering_ops.fits(x.shape[1], protected):
        count = core_clustering.num_candidates(r, x.shape[1] - protected, candidates)
        slots, order, start = clustering_ops.cluster(x, weights, r, protected, rounds, count)
        return Assignment(slots, x.shape[1] - r, order, start), a, weights
    if portable.exporting():
        assignment = core_clustering.cluster_exported(
            x, weights, r, protected=protected, rounds=rounds, candidates=candidates
        )
        return assignment, a, weights
    if _use_numba(x):
        from . import cpu

        return cpu.cluster(x, weights, r, protected=protected, rounds=rounds, candidates=candidates), a, weights
    return (
        core_clustering.cluster(x, weights, r, protected=protected, rounds=rounds, candidates=candidates),
        a,
        weights,
    )


@overload
def merge(
    x: Tensor,
    assignment: Assignment,
    *,
    weights: Tensor | None = None,
    sizes: Tensor | None = None,
    by_size: bool = False,
    also: None = None,
    keep_norm: bool = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def merge(
    x: Tensor,
    assignment: Assignment,
    *,
    weights: Tensor | None = None,
    sizes: Tensor | None = None,
    by_size: bool = False,
    also: Tensor,
    keep_norm: bool = False,
) -> tuple[Tensor, Tensor, Tensor]: ...
def merge(
    x: Tensor,
    assignment: Assignment,
    *,
    weights: Tensor | None = None,
    sizes: Tensor | None = None,
    by_size: bool = False,
    also: Tensor | None = None,
    keep_norm: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Merge the tokens of each slot: their weighted mean, B N C -> B M C, and the sum of their sizes, B M.

    weights: B N, non-negative, without gradient; None means 1.
    sizes: B N, the number of tokens that each token stands for; None means 1.
    by_size: a token's weight is multiplied by its size.
    also: B N C', merged by the same weights; its mean is returned between those of x and the sizes.
    keep_norm: the mean of x gets the weighted mean of its members' norms. The mean itself is shorter.
    """
    train = _needs_grad(x) if also is None else _needs_grad(x, also)
    if use_kernels(x) and (also is None or use_kernels(also)) and not (keep_norm and train):
        x_mean, also_mean, totals, _ = pooling_ops.pool(
            x, also, weights, sizes, by_size, keep_norm, assignment.slots, *assignment.members(), train
        )
        return (x_mean, totals) if also is None else (x_mean, also_mean, totals)
    counts = core_attention.at_least_float32(torch.ones_like(x[..., 0])) if sizes is None else sizes
    joint = joint_weights(weights, counts, by_size)
    if portable.exporting():
        return _merge_exported(x, also, joint, counts, assignment, keep_norm=keep_norm)
    totals = assignment.total(counts)
    if _use_numba(x) and not train and x.dtype == joint.dtype and (also is None or also.dtype == joint.dtype):
        from . import cpu

        x_mean = cpu.pool(x, joint, assignment, keep_norm=keep_norm)
        return (x_mean, totals) if also is None else (x_mean, cpu.pool(also, joint, assignment), totals)
    x_mean = assignment.pool(x, joint)
    if keep_norm:
        x_mean = _with_mean_norm(x_mean, x, assignment, joint)
    return (x_mean, totals) if also is None else (x_mean, assignment.pool(also, joint), totals)


def _merge_exported(
    x: Tensor, also: Tensor | None, weights: Tensor, counts: Tensor, assignment: Assignment, *, keep_norm: bool
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """`merge` by one sum over slots: of tokens, context, weights, sizes and norms side by side."""
    weights = weights[..., None]
    parts = [weights, counts[..., None], x * weights]
    if also is not None:
        parts.append(also * weights)
    if keep_norm:
        parts.append(core_attention.at_least_float32(x).norm(dim=-1, keepdim=True) * weights)
    sums = assignment.sum(torch.cat(parts, dim=2)).split([part.shape[2] for part in parts], dim=2)
    total, totals = sums[0].clamp_min(core_attention.TINY), sums[1][..., 0]
    x_mean = sums[2] / total
    if keep_norm:
        own = torch.linalg.vector_norm(x_mean, dim=2, keepdim=True).clamp_min(core_attention.TINY)
        x_mean = x_mean * (sums[-1] / (total * own))
    x_mean = x_mean.to(x.dtype)
    return (x_mean, totals) if also is None else (x_mean, (sums[3] / total).to(also.dtype), totals)


def _with_mean_norm(mean: Tensor, x: Tensor, assignment: Assignment, weights: Tensor) -> Tensor:
    """Means of slots (B M C) with the weighted mean of their members' norms."""
    norms = torch.linalg.vector_norm(x, dim=2, keepdim=True, dtype=weights.dtype)
    wanted = assignment.pool(norms, weights)
    own = torch.linalg.vector_norm(mean, dim=2, keepdim=True, dtype=weights.dtype)
    return mean * (wanted / own.clamp_min(core_attention.TINY)).to(mean.dtype)
