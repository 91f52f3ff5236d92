"""Attention over fused tokens, and what it says of their importance, without keeping an N x N map.

`sizes` (B N, float32) makes attention proportional: log s is added to every key's logits, so that a token standing
for s others counts s times. None means plain attention.

Axes: B images, H heads, N tokens, d channels a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .assignment import Assignment
from .criteria import at_least_float32

# The largest piece of an attention map held at once, in elements (64 MiB of float32): whole images are
# processed together up to here. Pieces of this size already run at full speed.
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
    logits = at_least_float32(q * scale) @ at_least_float32(k).transpose(-2, -1)
    if sizes is not None:
        logits = logits + size_bias(sizes, logits)
    return logits.softmax(dim=-1)


@torch.no_grad()
def informativeness(q: Tensor, k: Tensor, *, sizes: Tensor | None, scale: float, rows: str = "mean") -> Tensor:
    """Attention each token receives, averaged over heads: a_j = mean over rows of A[:, i, j], B N, without gradient.

    rows: "mean" over all query rows (the paper's), "class" for row 0 alone, "both" for the mean of these two.
    """
    batch, heads, tokens, _ = q.shape
    images = max(1, _PIECE // (heads * tokens * tokens))
    if images >= batch:
        return _received(q, k, sizes, scale, rows)
    pieces = [
        _received(q[i : i + images], k[i : i + images], None if sizes is None else sizes[i : i + images], scale, rows)
        for i in range(0, batch, images)
    ]
    return torch.cat(pieces)


def _received(q: Tensor, k: Tensor, sizes: Tensor | None, scale: float, rows: str) -> Tensor:
    if rows == "class":
        return attention_map(q[:, :, :1], k, sizes=sizes, scale=scale).mean(dim=(1, 2))
    full_map = attention_map(q, k, sizes=sizes, scale=scale)
    mean = full_map.mean(dim=(1, 2))
    return mean if rows == "mean" else (mean + full_map[:, :, 0].mean(dim=1)) / 2
