"""timm's Eva: EVA, EVA-02, DINOv3, the Perception Encoder, RoPE-ViT and others with rotary positions.

Each block rotates queries and keys by a table of sines and cosines, one row per patch. A fused token takes the mean of
the rows of the patches it covers: the rotated query is linear in them.

Axes: B images, H heads, N tokens, P patches among them, M tokens after fusion, d channels per head.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from timm.layers import AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention, EvaBlock, EvaBlockPostNorm
from torch import Tensor, nn

from ..core.assignment import Assignment
from ..core.flops import NORM, BlockShape
from ..core.positions import TokenPositions, positions_after
from ._inspect import macs_per_token
from .base import refuse_arguments
from .timm_base import BlockClasses, GammaScaleMixin, PostNormMixin, TimmHost, TimmOps, block_shape

_ATTENTION = (EvaAttention, AttentionRope)
BLOCKS: BlockClasses = {EvaBlock: _ATTENTION, EvaBlockPostNorm: _ATTENTION}


class TimmEva(TimmHost):
    """One Eva model."""

    block_classes: ClassVar = BLOCKS

    @property
    def uses_positions(self) -> bool:
        return self.model.rope is not None

    def arguments(self, rope: Tensor | None = None, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        refuse_arguments(*args, **kwargs)
        return {"rope": rope}

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> TimmOps:
        return eva_ops(block, arguments["rope"], positions)

    def block_shape(self, block: Any) -> BlockShape:
        return eva_shape(block)


class EvaOps(GammaScaleMixin, TimmOps):
    """The pieces of an EvaBlock for tokens at these positions. full_rope: the table of every patch, … P 2d, or None."""

    def __init__(self, block: Any, full_rope: Tensor | None, positions: TokenPositions | None) -> None:
        super().__init__(block)
        self.full_rope = full_rope
        self.positions = positions
        self.rope = full_rope
        if full_rope is not None and positions is not None:
            self.rope = _mean_rows(full_rope, positions, prefix=block.attn.num_prefix_tokens)

    def plain(self, x: Tensor) -> Tensor:
        return self.block(x, rope=self.rope)

    def fused(self, assignment: Assignment, weights: Tensor) -> Self:
        return type(self)(self.block, self.full_rope, positions_after(self.positions, assignment, weights))

    def queries_keys(self, h: Tensor) -> tuple[Tensor, Tensor]:
        attn = self.block.attn
        if attn.qkv is not None:
            return super().queries_keys(h)
        q, k = self._norm_and_rotate(self.split_heads(attn.q_proj(h)), self._split_shared(attn.k_proj(h)))
        return q, self._repeat(k)

    def values(self, h: Tensor) -> Tensor:
        attn = self.block.attn
        if attn.qkv is not None:
            return super().values(h)
        return self._repeat(self._split_shared(attn.v_proj(h))).transpose(1, 2).flatten(2)

    def queries_keys_values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.block.attn.qkv is not None:
            return super().queries_keys_values(h)
        return *self.queries_keys(h), self.split_heads(self.values(h))

    def _split_shared(self, flat: Tensor) -> Tensor:
        """Keys or values, of which several query heads may share one: B N (h d) -> B h N d."""
        attn = self.block.attn
        return flat.unflatten(2, (-1, attn.proj.in_features // attn.num_heads)).transpose(1, 2)

    def _repeat(self, x: Tensor) -> Tensor:
        """One per query head: B h N d -> B H N d."""
        shared = _queries_per_key(self.block.attn)
        return x if shared == 1 else x.repeat_interleave(shared, dim=1)

    def _rotate(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if self.rope is None:
            return x
        attn = self.block.attn
        prefix, patches = x[:, :, : attn.num_prefix_tokens], x[:, :, attn.num_prefix_tokens :]
        rotated = apply_rot_embed_cat(patches, self.rope, half=attn.rotate_half)
        return torch.cat([prefix, rotated], dim=2).to(dtype)


class EvaPostNormOps(PostNormMixin, EvaOps):
    """The pieces of an EvaBlockPostNorm."""


def eva_ops(block: nn.Module, rope: Tensor | None, positions: TokenPositions | None) -> EvaOps:
    """The pieces of a block of one of BLOCKS."""
    kind = EvaPostNormOps if isinstance(block, EvaBlockPostNorm) else EvaOps
    return kind(block, rope, positions)


def eva_shape(block: Any) -> BlockShape:
    attn = block.attn
    shared = _queries_per_key(attn)
    norms = macs_per_token(attn.q_norm) * attn.num_heads + macs_per_token(attn.k_norm) * attn.num_heads // shared
    shape = block_shape(block, norm_first=not isinstance(block, EvaBlockPostNorm))
    return replace(shape, shared=shared, head_norms=norms // NORM)


def _queries_per_key(attn: Any) -> int:
    return getattr(attn, "num_kv_groups", 1)


def _mean_rows(rope: Tensor, positions: TokenPositions, *, prefix: int) -> Tensor:
    """A table's mean over the positions of each token: P K, H P K or B H P K -> B H (M - prefix) K, with H or 1."""
    while rope.dim() < 4:
        rope = rope[None]
    heads = rope.shape[1]
    rows = F.pad(rope.transpose(1, 2).flatten(2), (0, 0, prefix, 0))  # prefix tokens have positions, but no rows
    return positions.mean(rows)[:, prefix:].unflatten(2, (heads, -1)).transpose(1, 2)
