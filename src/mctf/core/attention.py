"""Attention over fused tokens, and what it says of their importance, without keeping an N x N map.

Axes: B images, H heads, N tokens, d channels a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .criteria import at_least_float32

# The largest piece of an attention map held at once, in elements (64 MiB of float32): whole images are
# processed together up to here. Pieces of this size already run at full speed.
_PIECE = 1 << 24


def size_bias(sizes: Tensor | None, like: Tensor) -> Tensor | None:
    """Proportional attention: log s added to every key's logits, B 1 1 N; None while all tokens have size 1."""
    return None if sizes is None else sizes.log().to(like.dtype)[:, None, None, :]


def attend(q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, scale: float, dropout: float = 0.0) -> Tensor:
    """softmax(q kT * scale + bias) v with the heads joined again: B N (H d)."""
    context = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
    return context.transpose(1, 2).flatten(2)


def attention_map(q: Tensor, k: Tensor, *, bias: Tensor | None, scale: float) -> Tensor:
    """softmax(q kT * scale + bias) itself: B H N N, in at least float32."""
    logits = at_least_float32((q * scale) @ k.transpose(-2, -1))
    if bias is not None:
        logits = logits + bias
    return logits.softmax(dim=-1)


@torch.no_grad()
def informativeness(q: Tensor, k: Tensor, *, bias: Tensor | None, scale: float) -> Tensor:
    """Column mean of the attention: a_j = mean over heads and query rows of A[:, :, j], B N, without gradient."""
    batch, heads, tokens, _ = q.shape
    images = max(1, _PIECE // (heads * tokens * tokens))
    if images >= batch:
        return _column_mean(q, k, bias, scale)
    pieces = [
        _column_mean(q[i : i + images], k[i : i + images], None if bias is None else bias[i : i + images], scale)
        for i in range(0, batch, images)
    ]
    return torch.cat(pieces)


def _column_mean(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return attention_map(q, k, bias=bias, scale=scale).mean(dim=(1, 2))
