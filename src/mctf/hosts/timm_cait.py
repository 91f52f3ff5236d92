"""timm's CaiT: blocks with talking heads on patches alone, then a class-attention stage that reads all patches.

Talking heads mix the attention map across heads before and after the softmax:

    A = after(softmax(before(q kT * scale) + log s))

`before` and `after` are affine maps over the H heads of one pair of tokens. A token of size s counts as s equal keys.
Each of them has the weight softmax / s and passes through `after` alone, so together they weigh

    s * after(softmax(before(q kT * scale) + log s) / s)

which is the sum of their columns, constant term included. Rows of A need not sum to 1, nor be positive.

The class-attention stage gets one token per patch, so a fused token counts as often as it covers patches.

Axes: B images, H heads, N tokens, C channels, d channels per head.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from timm.models.cait import LayerScaleBlock, TalkingHeadAttn
from torch import Tensor, nn

from ..core.assignment import Assignment
from ..core.attention import ReceivedAttention, batch_chunks, column_means
from ..core.flops import BlockShape
from ..core.matching import at_least_float32
from ..core.positions import TokenPositions
from ._inspect import macs_per_token
from .timm_base import GammaScaleMixin, TimmHost, TimmOps, block_shape


class TimmCait(TimmHost):
    """One Cait model."""

    block_classes: ClassVar = {LayerScaleBlock: (TalkingHeadAttn,)}

    @property
    def class_token(self) -> bool:
        return False

    @property
    def class_feature(self) -> bool:
        return True

    @property
    def protected(self) -> int:
        return 0

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> "CaitOps":
        return CaitOps(block)

    def block_shape(self, block: Any) -> BlockShape:
        return replace(block_shape(block), mixing=macs_per_token(block.attn.proj_l, block.attn.proj_w))

    def head_cost(self, tokens: int) -> int:
        """The class-attention stage, the norm of its class token, and the classifier."""
        model = self.model
        keys = tokens + 1  # the class token attends to itself too
        stage = 0
        for block in model.blocks_token_only:  # norm, keys, values and two products per token; the rest once
            attn = block.attn
            stage += keys * (macs_per_token(block.norm1, attn.k, attn.v) + 2 * model.embed_dim)
            stage += macs_per_token(attn.q, attn.proj, block.norm2, block.mlp)
        return stage + macs_per_token(model.norm) + macs_per_token(model.head) * (1 if model.global_pool else keys)


class CaitOps(GammaScaleMixin, TimmOps):
    """The pieces of a LayerScaleBlock."""

    def attention_map(self, q: Tensor, k: Tensor, *, sizes: Tensor | None) -> Tensor:
        """The map A that multiplies the values, B H N N, in the dtype of q."""
        attn = self.block.attn
        logits = attn.proj_l(((q * attn.scale) @ k.transpose(-2, -1)).permute(0, 2, 3, 1))  # B N N H
        if sizes is None:
            return attn.proj_w(logits.softmax(dim=2)).permute(0, 3, 1, 2)
        counts = sizes[:, None, :, None]
        weights = (logits + counts.log().to(logits.dtype)).softmax(dim=2)
        counts = counts.to(weights.dtype)
        return (attn.proj_w(weights / counts.clamp_min(1)) * counts).permute(0, 3, 1, 2)  # padding has size 0

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sizes: Tensor | None,
        unpool: Assignment | None = None,
        received: ReceivedAttention | None = None,
    ) -> Tensor:
        if unpool is not None:
            v = unpool.unpool(v.transpose(1, 2)).transpose(1, 2)
        return torch.cat([self._context(full_map, v[part]) for part, full_map in self._map_chunks(q, k, sizes)])

    @torch.no_grad()
    def attention_received(
        self, q: Tensor, k: Tensor, *, sizes: Tensor | None, rows: str, keep: bool = False
    ) -> ReceivedAttention:
        if rows == "class":
            q = q[:, :, :1]
        sums = [_received(full_map, rows) for _, full_map in self._map_chunks(q, k, sizes)]
        return ReceivedAttention(torch.cat(sums)[:, None])

    def attend_with_received(
        self, q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, rows: str
    ) -> tuple[Tensor, Tensor]:
        contexts, sums = [], []
        for part, full_map in self._map_chunks(q, k, sizes):
            contexts.append(self._context(full_map, v[part]))
            sums.append(_received(full_map.detach(), rows))
        return torch.cat(contexts), torch.cat(sums)[:, None]

    def _map_chunks(self, q: Tensor, k: Tensor, sizes: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """The attention map, some images at a time."""
        for part in batch_chunks(q, k):
            yield part, self.attention_map(q[part], k[part], sizes=None if sizes is None else sizes[part])

    def _context(self, full_map: Tensor, v: Tensor) -> Tensor:
        """The map times the values with the heads joined again: B N (H d)."""
        return (self.block.attn.attn_drop(full_map).to(v.dtype) @ v).transpose(1, 2).flatten(2)

    def _drop_path(self, branch: int, x: Tensor) -> Tensor:
        return self.block.drop_path(x)


def _received(full_map: Tensor, rows: str) -> Tensor:
    """Attention each token receives, B N; a negative mean counts as 0."""
    return column_means(at_least_float32(full_map), rows).clamp_min(0)
