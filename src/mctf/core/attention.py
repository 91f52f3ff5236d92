"""Attention over fused tokens, and the attention that tokens receive, by chunks of the N x N map where it is needed.

`sizes` (B N, float32) makes attention proportional: log s is added to every key's logits, so that a token standing for
s others counts s times. None means plain attention. `bias` (H N N or B H N N) is added to the logits as well, where a
model has relative positions.

Axes: B images, H heads, N tokens, d channels per head.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import portable
from .assignment import Assignment

TINY = 1e-30  # attention may underflow to 0; its logarithm must not

# The largest chunk of an attention map held at once, in elements. On a CPU it should stay in the cache: on two cores
# `informativeness` of 8 x 6 x 197 tokens takes 4-5 ms by chunks of 2 MiB and 10-11 ms at once. Elsewhere 64 MiB do.
_CPU_CHUNK = 1 << 19
_CHUNK = 1 << 24
_KEEP_MAX = 1 << 24  # elements of a map that a CPU may keep from `attention_received` to `attend`: 64 MiB


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class ReceivedAttention:
    """The attention that tokens receive.

    partial: B G N, partial sums of the attention each token receives; informativeness is their sum over G.
    map_chunks: the attention map itself, a few images per chunk, where keeping it is cheaper than recomputing it.
    """

    partial: Tensor
    map_chunks: tuple[Tensor, ...] = ()


def total_received(partial: Tensor) -> Tensor:
    """Informativeness from its partial sums, B G N -> B N; clamped away from zero."""
    whole = partial.squeeze(1) if partial.shape[1] == 1 else partial.sum(dim=1)
    return whole.clamp_min(TINY)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sizes: Tensor | None,
    scale: float,
    dropout: float = 0.0,
    unpool: Assignment | None = None,
    bias: Tensor | None = None,
    received: ReceivedAttention | None = None,
) -> Tensor:
    """softmax(q kT * scale + bias + log s) v with heads joined: B N (H d).

    unpool: v has one row per slot (B H M d) and each key takes the value of its slot.
    received: the result of `attention_received` for the same q, k and sizes; its map chunks are reused.
    """
    if unpool is not None:
        v = unpool.unpool(v.transpose(1, 2)).transpose(1, 2)
    if received is not None and received.map_chunks and not dropout:
        chunks = received.map_chunks
        parts = v.split([chunk.shape[0] for chunk in chunks])
        return torch.cat([_context(chunk, part) for chunk, part in zip(chunks, parts, strict=True)])
    if portable.for_onnx():  # a view of PyTorch's fused attention with a mask is lost in the conversion
        return _context(attention_map(q, k, sizes=sizes, scale=scale, bias=bias), v)
    mask = additive_mask(sizes, bias, q)
    context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return context.transpose(1, 2).flatten(2)


def additive_mask(sizes: Tensor | None, bias: Tensor | None, like: Tensor) -> Tensor | None:
    """bias + log s as an additive attention mask, B 1 1 N or B H N N; None where there is nothing to add."""
    if bias is not None and bias.dim() == 3:
        bias = bias[None]
    if sizes is None:
        return None if bias is None else bias.to(like.dtype)
    log_sizes = sizes.log().to(like.dtype)[:, None, None, :]
    return log_sizes if bias is None else bias.to(like.dtype) + log_sizes


def attention_map(q: Tensor, k: Tensor, *, sizes: Tensor | None, scale: float, bias: Tensor | None = None) -> Tensor:
    """softmax(q kT * scale + bias + log s) itself: B H N N, in at least float32."""
    if portable.exporting():
        logits = at_least_float32(q * scale) @ at_least_float32(k).transpose(2, 3)
        mask = additive_mask(sizes, bias, logits)
        return (logits if mask is None else logits + mask).softmax(dim=-1)
    batch, heads = q.shape[:2]
    queries = at_least_float32(q * scale).flatten(0, 1)
    keys = at_least_float32(k).flatten(0, 1).transpose(1, 2)
    logits = queries @ keys
    mask = additive_mask(sizes, bias, logits)
    if mask is not None:
        logits += mask.expand(batch, heads, -1, -1).flatten(0, 1)
    return logits.softmax(dim=-1).unflatten(0, (batch, heads))


@torch.no_grad()
def informativeness(
    q: Tensor, k: Tensor, *, sizes: Tensor | None, scale: float, rows: str = "mean", bias: Tensor | None = None
) -> Tensor:
    """Attention each token receives, averaged over heads: a_j = mean over rows of A[:, i, j], B N, without gradient.

    rows: "mean" over all query rows (the paper's), "class" for row 0 alone, "both" for the mean of these two.
    """
    if rows == "class":
        q, bias = q[:, :, :1], None if bias is None else bias[..., :1, :]
    return torch.cat([column_means(full_map, rows) for full_map in _map_chunks(q, k, sizes, scale, bias)])


def attention_received(
    q: Tensor,
    k: Tensor,
    *,
    sizes: Tensor | None,
    scale: float,
    rows: str = "mean",
    bias: Tensor | None = None,
    keep: bool = False,
) -> ReceivedAttention:
    """`informativeness`, and with `keep` the map, where keeping it is cheaper than recomputing it."""
    if rows == "class" or not (keep and _keeps_map(q, k)):
        return ReceivedAttention(informativeness(q, k, sizes=sizes, scale=scale, rows=rows, bias=bias)[:, None])
    chunks = tuple(_map_chunks(q, k, sizes, scale, bias))
    return ReceivedAttention(torch.cat([column_means(chunk, rows) for chunk in chunks])[:, None], chunks)


def _keeps_map(q: Tensor, k: Tensor) -> bool:
    """Whether to keep a map: on a CPU, without gradient, while it is not large; not in a graph, whose batch may vary.

    Not in float16, whose products are slow, nor under autocast, which would make the map itself coarse.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_grad_enabled():
        return False
    if q.device.type != "cpu" or q.dtype == torch.float16 or torch.is_autocast_enabled("cpu"):
        return False
    return q.shape[:3].numel() * k.shape[2] <= _KEEP_MAX


def attend_with_received(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sizes: Tensor | None,
    scale: float,
    rows: str = "mean",
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` and `informativeness` of the same attention: B N (H d) and B N.

    Without gradient both read each chunk of the map while it is there; with gradient it must not be kept.
    """
    trains = torch.is_grad_enabled() and (q.requires_grad or v.requires_grad)
    if dropout or (trains and not torch.jit.is_tracing()):  # a trace is checked by another one, without gradient
        context = attend(q, k, v, sizes=sizes, scale=scale, dropout=dropout, bias=bias)
        return context, informativeness(q, k, sizes=sizes, scale=scale, rows=rows, bias=bias)
    contexts, means = [], []
    done = 0
    for full_map in _map_chunks(q, k, sizes, scale, bias):
        contexts.append(_context(full_map, v[done : done + full_map.shape[0]]))
        means.append(column_means(full_map, rows))
        done += full_map.shape[0]  # not len(): it would fix the batch of an exported model
    return torch.cat(contexts), torch.cat(means)


def _context(full_map: Tensor, v: Tensor) -> Tensor:
    """A map times values with heads joined: B N (H d)."""
    return (full_map.to(v.dtype) @ v).transpose(1, 2).flatten(2)


def _map_chunks(q: Tensor, k: Tensor, sizes: Tensor | None, scale: float, bias: Tensor | None) -> Iterator[Tensor]:
    """The attention map, a few images at a time."""
    for part in batch_chunks(q, k):
        own_sizes = None if sizes is None else sizes[part]
        own_bias = bias if bias is None or bias.dim() == 3 or bias.shape[0] == 1 else bias[part]
        yield attention_map(q[part], k[part], sizes=own_sizes, scale=scale, bias=own_bias)


def batch_chunks(q: Tensor, k: Tensor) -> list[slice]:
    """Slices of the batch whose attention maps may be held at once."""
    # in an exported or traced model a chunk size would be the largest batch, or the only one
    if portable.exporting() or torch.jit.is_tracing():
        return [slice(None)]
    in_cache = q.device.type == "cpu" and not torch.compiler.is_compiling()
    images = max(1, (_CPU_CHUNK if in_cache else _CHUNK) // (q.shape[1] * q.shape[2] * k.shape[2]))
    if images >= q.shape[0]:
        return [slice(None)]
    return [slice(i, i + images) for i in range(0, q.shape[0], images)]


def column_means(full_map: Tensor, rows: str) -> Tensor:
    """Column means of a map over heads and rows, B H N N -> B N; see `informativeness`."""
    if rows == "class":
        return full_map[:, :, 0].mean(dim=1)
    if portable.exporting():  # one product
        heads, queries = full_map.shape[1:3]
        weights = full_map.new_full((heads, queries), 1 / (heads * queries))
        if rows == "both":
            weights = weights / 2 + F.pad(full_map.new_full((heads, 1), 1 / (2 * heads)), (0, queries - 1))
        return (weights.view(1, -1) @ full_map.flatten(1, 2)).squeeze(1)
    mean = full_map.mean(dim=(1, 2))
    return mean if rows == "mean" else (mean + full_map[:, :, 0].mean(dim=1)) / 2
