"""The pieces of timm's blocks, through their own modules.

Axes: B images, H heads, N tokens, C channels, d channels a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.cost import NORM, BlockShape
from .attention import SoftmaxAttention
from .common import macs_per_token, part_of


class TimmOps(SoftmaxAttention):
    """What all of timm's blocks have in common: one product for q, k and v, optional norms and gate, a projection."""

    def __init__(self, block: Any) -> None:
        self.block = block

    @property
    def scale(self) -> float:
        return self.block.attn.scale

    @property
    def attention_dropout(self) -> float:
        attn = self.block.attn
        return attn.attn_drop.p if attn.training else 0.0

    def plain(self, x: Tensor) -> Tensor:
        return self.block(x)

    def norm1(self, x: Tensor) -> Tensor:
        return self.block.norm1(x)

    def queries_keys(self, h: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self._split(qkv_part(self.block.attn, h, 0, 2), 2)
        return self._finished(q, k)

    def values(self, h: Tensor) -> Tensor:
        return qkv_part(self.block.attn, h, 2, 3)

    def queries_keys_values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._split(qkv_part(self.block.attn, h, 0, 3), 3)
        return *self._finished(q, k), v

    def split_heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(2, (self.block.attn.num_heads, -1)).transpose(1, 2)

    def finish_context(self, context: Tensor, h: Tensor) -> Tensor:
        context = self._normed("norm", context)
        gate = getattr(self.block.attn, "gate", None)
        return context if gate is None else context * gate(h).sigmoid()

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.block.drop_path1(self.block.ls1(self._project(context)))

    def add_mlp(self, x: Tensor) -> Tensor:
        block = self.block
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))

    def _split(self, flat: Tensor, parts: int) -> tuple[Tensor, ...]:
        """B N (parts H d) -> parts of B H N d."""
        return flat.unflatten(2, (parts, self.block.attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def _finished(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys after what the block does to them behind their product: norms, positions."""
        return self._placed(self._normed("q_norm", q), q.dtype), self._placed(self._normed("k_norm", k), k.dtype)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        norm = getattr(self.block.attn, name, None)
        return x if norm is None else norm(x)

    def _placed(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Queries or keys (B H N d) told where their tokens are, in this dtype: most blocks do nothing."""
        return x

    def _project(self, context: Tensor) -> Tensor:
        attn = self.block.attn
        return attn.proj_drop(attn.proj(context))


class PostNorm(TimmOps):
    """A block whose norms follow attention and MLP."""

    def norm1(self, x: Tensor) -> Tensor:
        return x

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.block.drop_path1(self.block.norm1(self._project(context)))

    def add_mlp(self, x: Tensor) -> Tensor:
        block = self.block
        return x + block.drop_path2(block.norm2(block.mlp(x)))


class GammaScaled(TimmOps):
    """A block whose LayerScale is a pair of bare parameters, or None."""

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self._drop_path(1, scaled(self._project(context), self.block.gamma_1))

    def add_mlp(self, x: Tensor) -> Tensor:
        block = self.block
        return x + self._drop_path(2, scaled(block.mlp(block.norm2(x)), block.gamma_2))

    def _drop_path(self, branch: int, x: Tensor) -> Tensor:
        return getattr(self.block, f"drop_path{branch}")(x)


def scaled(x: Tensor, gamma: Tensor | None) -> Tensor:
    return x if gamma is None else gamma * x


def qkv_part(attn: Any, h: Tensor, first: int, last: int) -> Tensor:
    """Parts first .. last of q, k and v side by side, from attention's one product: B N (parts H d).

    EVA and BEiT keep the biases of q and v apart; the bias of k is a buffer of zeros.
    """
    width = attn.proj.in_features
    start, stop = first * width, last * width
    if getattr(attn, "q_bias", None) is None:
        return part_of(attn.qkv, h, start, stop)
    bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias][first:last])
    if attn.qkv_bias_separate:
        return part_of(attn.qkv, h, start, stop) + bias
    return F.linear(h, attn.qkv.weight[start:stop], bias)


def block_shape(block: Any, *, norm_first: bool = True) -> BlockShape:
    """What a block's cost follows from."""
    attn = block.attn
    optional = {name: getattr(attn, name, None) for name in ("q_norm", "k_norm", "norm", "gate")}
    return BlockShape(
        channels=attn.proj.out_features,
        attention=attn.proj.in_features,
        heads=attn.num_heads,
        mlp=macs_per_token(block.mlp),
        norms=macs_per_token(block.norm1) // NORM,
        norm_first=norm_first,
        head_norms=macs_per_token(optional["q_norm"], optional["k_norm"]) // NORM * attn.num_heads,
        context=macs_per_token(optional["norm"], optional["gate"]),
    )
