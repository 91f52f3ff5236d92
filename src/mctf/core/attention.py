"""Attention over fused tokens, and what it says of their importance, by pieces of its N x N map where it needs one.

`sizes` (B N, float32) makes attention proportional: log s is added to every key's logits, so that a token standing
for s others counts s times. None means plain attention. `bias` (H N N or B H N N) is added to the logits as well,
where a model has relative positions.

Axes: B images, H heads, N tokens, d channels a head.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .assignment import Assignment
from .matching import at_least_float32

# The largest piece of an attention map held at once, in elements. On a CPU it should stay in the cache: on two cores
# `informativeness` of 8 x 6 x 197 tokens took 4-5 ms by pieces of 2 MiB and 10-11 ms at once. Elsewhere 64 MiB do.
_CPU_CHUNK = 1 << 19
_CHUNK = 1 << 24
_KEEP_MAX = 1 << 24  # elements of a map that a CPU may keep from looking to attending: 64 MiB


@dataclass(frozen=True)
class ReceivedAttention:
    """The attention that tokens receive.

    partial: B G N, partial sums of the attention each token receives; informativeness is their sum over G.
    map_chunks: the attention map itself, a few images per chunk, where keeping it is cheaper than recomputing it.
    """

    partial: Tensor
    map_chunks: tuple[Tensor, ...] = ()


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
    """softmax(q kT * scale + bias + log s) v with the heads joined again: B N (H d).

    unpool: v has one row per slot (B H M d) and each key takes the value of its slot.
    received: what `attention_received` returned for the same q, k and sizes; its map chunks are reused.
    """
    if unpool is not None:
        v = unpool.unpool(v.transpose(1, 2)).transpose(1, 2)
    if received is not None and received.map_chunks and not dropout:
        chunks = received.map_chunks
        parts = v.split([chunk.shape[0] for chunk in chunks])
        return torch.cat([_context(chunk, part) for chunk, part in zip(chunks, parts, strict=True)])
    added = added_bias(sizes, bias, q)
    context = F.scaled_dot_product_attention(q, k, v, attn_mask=added, dropout_p=dropout, scale=scale)
    return context.transpose(1, 2).flatten(2)


def added_bias(sizes: Tensor | None, bias: Tensor | None, like: Tensor) -> Tensor | None:
    """bias + log s as an additive attention mask, B 1 1 N or B H N N; None where there is nothing to add."""
    if bias is not None and bias.dim() == 3:
        bias = bias[None]
    if sizes is None:
        return None if bias is None else bias.to(like.dtype)
    log_sizes = sizes.log().to(like.dtype)[:, None, None, :]
    return log_sizes if bias is None else bias.to(like.dtype) + log_sizes


def attention_map(q: Tensor, k: Tensor, *, sizes: Tensor | None, scale: float, bias: Tensor | None = None) -> Tensor:
    """softmax(q kT * scale + bias + log s) itself: B H N N, in at least float32."""
    batch, heads = q.shape[:2]
    queries = at_least_float32(q * scale).flatten(0, 1)
    keys = at_least_float32(k).flatten(0, 1).transpose(1, 2)
    logits = queries @ keys
    added = added_bias(sizes, bias, logits)
    if added is not None:
        logits += added.expand(batch, heads, -1, -1).flatten(0, 1)
    return logits.softmax(dim=-1).unflatten(0, (-1, heads))


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
    """`informativeness`, and with `keep` the attention, where it is cheaper to keep than to compute again."""
    if rows == "class" or not (keep and _keeps_map(q, k)):
        return ReceivedAttention(informativeness(q, k, sizes=sizes, scale=scale, rows=rows, bias=bias)[:, None])
    chunks, sums = [], []
    for full_map in _map_chunks(q, k, sizes, scale, bias):
        chunks.append(full_map)
        sums.append(column_means(full_map, rows))
    return ReceivedAttention(torch.cat(sums)[:, None], tuple(chunks))


def _keeps_map(q: Tensor, k: Tensor) -> bool:
    """On a CPU, without gradient, while it is not large; not in a graph, whose batch may vary.

    Nor in float16, whose products are slow, nor under autocast, which would make the map itself coarse.
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

    Without gradient both read the map while a piece of it is there; with gradient it must not be kept.
    """
    if dropout or (torch.is_grad_enabled() and (q.requires_grad or v.requires_grad)):
        context = attend(q, k, v, sizes=sizes, scale=scale, dropout=dropout, bias=bias)
        return context, informativeness(q, k, sizes=sizes, scale=scale, rows=rows, bias=bias)
    contexts, sums = [], []
    done = 0
    for full_map in _map_chunks(q, k, sizes, scale, bias):
        values = v[done : done + full_map.shape[0]]
        contexts.append(_context(full_map, values))
        sums.append(column_means(full_map, rows))
        done += full_map.shape[0]  # not len(): it would fix the batch of an exported model
    return torch.cat(contexts), torch.cat(sums)


def _context(full_map: Tensor, v: Tensor) -> Tensor:
    """A map times values with the heads joined again: B N (H d)."""
    return (full_map.to(v.dtype) @ v).transpose(1, 2).flatten(2)


def _map_chunks(q: Tensor, k: Tensor, sizes: Tensor | None, scale: float, bias: Tensor | None) -> Iterator[Tensor]:
    """The attention map, some images at a time."""
    for part in batch_chunks(q, k):
        own_sizes = None if sizes is None else sizes[part]
        own_bias = bias if bias is None or bias.dim() == 3 or bias.shape[0] == 1 else bias[part]
        yield attention_map(q[part], k[part], sizes=own_sizes, scale=scale, bias=own_bias)


def batch_chunks(q: Tensor, k: Tensor) -> list[slice]:
    """Slices of the batch whose attention maps may be held at once."""
    if torch.compiler.is_exporting():  # a size of pieces would be the largest batch that the exported model takes
        return [slice(None)]
    in_cache = q.device.type == "cpu" and not torch.compiler.is_compiling()
    images = max(1, (_CPU_CHUNK if in_cache else _CHUNK) // (q.shape[1] * q.shape[2] * k.shape[2]))
    if images >= q.shape[0]:
        return [slice(None)]
    return [slice(i, i + images) for i in range(0, q.shape[0], images)]


def column_means(full_map: Tensor, rows: str) -> Tensor:
    """Mean over heads of the rows of a map, B H N N -> B N; see `informativeness`."""
    if rows == "class":
        return full_map[:, :, 0].mean(dim=1)
    mean = full_map.mean(dim=(1, 2))
    return mean if rows == "mean" else (mean + full_map[:, :, 0].mean(dim=1)) / 2
