"""Attention over fused tokens, and what it says of their importance, without keeping an N x N map.

`sizes` (B N, float32) makes attention proportional: log s is added to every key's logits, so that a token standing
for s others counts s times. None means plain attention.

Axes: B images, H heads, N tokens, d channels a head.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .assignment import Assignment
from .criteria import at_least_float32

# The largest piece of an attention map held at once, in elements. On a CPU it should stay in the cache: on two cores
# `informativeness` of 8 x 6 x 197 tokens took 4-5 ms by pieces of 2 MiB and 10-11 ms at once. Elsewhere 64 MiB do.
_CPU_PIECE = 1 << 19
_PIECE = 1 << 24


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
    """softmax(q kT * scale + log s) v with the heads joined again: B N (H d).

    With `spread`, v has one row a slot (B H M d) and each key takes the value of its slot.
    """
    if spread is not None:
        v = spread.spread(v.transpose(1, 2)).transpose(1, 2)
    bias = None if sizes is None else size_bias(sizes, q)
    context = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
    return context.transpose(1, 2).flatten(2)


def size_bias(sizes: Tensor, like: Tensor) -> Tensor:
    """log s as an additive attention mask: B 1 1 N."""
    return sizes.log().to(like.dtype)[:, None, None, :]


def attention_map(q: Tensor, k: Tensor, *, sizes: Tensor | None, scale: float) -> Tensor:
    """softmax(q kT * scale + log s) itself: B H N N, in at least float32."""
    heads = q.shape[1]
    queries = at_least_float32(q * scale).flatten(0, 1)
    keys = at_least_float32(k).flatten(0, 1).transpose(1, 2)
    logits = queries @ keys
    if sizes is not None:
        logits += size_bias(sizes, logits).expand(-1, heads, -1, -1).flatten(0, 1)
    return logits.softmax(dim=-1).unflatten(0, (-1, heads))


@torch.no_grad()
def informativeness(q: Tensor, k: Tensor, *, sizes: Tensor | None, scale: float, rows: str = "mean") -> Tensor:
    """Attention each token receives, averaged over heads: a_j = mean over rows of A[:, i, j], B N, without gradient.

    rows: "mean" over all query rows (the paper's), "class" for row 0 alone, "both" for the mean of these two.
    """
    queries = q[:, :, :1] if rows == "class" else q
    pieces = [_received(full_map, rows) for full_map in _map_pieces(queries, k, sizes, scale)]
    return torch.cat(pieces)


def attend_and_look(
    q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, scale: float, rows: str = "mean", dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`attend` and `informativeness` of the same attention: B N (H d) and B N.

    Without gradient both read the map while a piece of it is there; with gradient it must not be kept.
    """
    if dropout or (torch.is_grad_enabled() and (q.requires_grad or v.requires_grad)):
        context = attend(q, k, v, sizes=sizes, scale=scale, dropout=dropout)
        return context, informativeness(q, k, sizes=sizes, scale=scale, rows=rows)
    contexts, received = [], []
    done = 0
    for full_map in _map_pieces(q, k, sizes, scale):
        values = v[done : done + full_map.shape[0]]
        contexts.append((full_map.to(v.dtype) @ values).transpose(1, 2).flatten(2))
        received.append(_received(full_map, rows))
        done += full_map.shape[0]  # not len(): it would fix the batch of an exported model
    return torch.cat(contexts), torch.cat(received)


def _map_pieces(q: Tensor, k: Tensor, sizes: Tensor | None, scale: float) -> Iterator[Tensor]:
    """The attention map, some images at a time."""
    in_cache = q.device.type == "cpu" and not torch.compiler.is_compiling()
    images = max(1, (_CPU_PIECE if in_cache else _PIECE) // (q.shape[1] * q.shape[2] * k.shape[2]))
    if images >= q.shape[0]:  # without a loop, whose length an exported model could not vary
        yield attention_map(q, k, sizes=sizes, scale=scale)
        return
    for i in range(0, q.shape[0], images):
        part = slice(i, i + images)
        yield attention_map(q[part], k[part], sizes=None if sizes is None else sizes[part], scale=scale)


def _received(full_map: Tensor, rows: str) -> Tensor:
    if rows == "class":
        return full_map[:, :, 0].mean(dim=1)
    mean = full_map.mean(dim=(1, 2))
    return mean if rows == "mean" else (mean + full_map[:, :, 0].mean(dim=1)) / 2
