"""Talking heads: attention whose map is mixed across heads before and after the softmax.

    A = after(softmax(before(q kT * scale) + log s))

`before` and `after` are affine maps of the H heads of one pair of tokens. A token of size s stands for s equal keys.
Each of these would have the weight softmax / s and go through `after` by itself, so together they weigh

    s * after(softmax(before(q kT * scale) + log s) / s)

which is the sum of their columns, constant term included. Rows of A need not sum to 1, nor be positive.

Axes: B images, H heads, N tokens, d channels a head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from .timm_base import GammaScaled, TimmHost, block_shape

Mix = Callable[[Tensor], Tensor]  # … H -> … H


@dataclass(frozen=True)
class TalkingHeads:
    """One block's way to mix its heads. dropped: its dropout of attention weights."""

    before: Mix
    after: Mix
    dropped: Callable[[Tensor], Tensor]
    scale: float

    def map(self, q: Tensor, k: Tensor, *, sizes: Tensor | None) -> Tensor:
        """The attention map, B H N N, as it multiplies the values; in the dtype of q, as in the host."""
        pairs = ((q * self.scale) @ k.transpose(-2, -1)).permute(0, 2, 3, 1)  # B N N H
        logits = self.before(pairs)
        if sizes is None:
            return self.after(logits.softmax(dim=2)).permute(0, 3, 1, 2)
        counts = sizes[:, None, :, None]
        shares = (logits + counts.log().to(logits.dtype)).softmax(dim=2)
        counts = counts.to(shares.dtype)
        return (self.after(shares / counts.clamp_min(1)) * counts).permute(0, 3, 1, 2)  # padding counts 0 times

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, unpool: Assignment | None = None
    ) -> Tensor:
        """The map times the values, heads joined, some images at a time: B N (H d)."""
        if unpool is not None:
            v = unpool.unpool(v.transpose(1, 2)).transpose(1, 2)
        contexts = [
            self._context(self.map(q[part], k[part], sizes=_of(sizes, part)), v[part]) for part in batch_chunks(q, k)
        ]
        return torch.cat(contexts)

    @torch.no_grad()
    def informativeness(self, q: Tensor, k: Tensor, *, sizes: Tensor | None, rows: str) -> Tensor:
        """Attention each token receives, B N; where heads weigh it below 0, not even that."""
        if rows == "class":
            q = q[:, :, :1]
        sums = [_received(self.map(q[part], k[part], sizes=_of(sizes, part)), rows) for part in batch_chunks(q, k)]
        return torch.cat(sums)

    def attend_with_received(
        self, q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, rows: str
    ) -> tuple[Tensor, Tensor]:
        """`attend` and `informativeness` of the same map."""
        contexts, sums = [], []
        for part in batch_chunks(q, k):
            full_map = self.map(q[part], k[part], sizes=_of(sizes, part))
            contexts.append(self._context(full_map, v[part]))
            sums.append(_received(full_map.detach(), rows))
        return torch.cat(contexts), torch.cat(sums)

    def _context(self, full_map: Tensor, v: Tensor) -> Tensor:
        return (self.dropped(full_map).to(v.dtype) @ v).transpose(1, 2).flatten(2)


def _received(full_map: Tensor, rows: str) -> Tensor:
    return column_means(at_least_float32(full_map), rows).clamp_min(0)


def _of(sizes: Tensor | None, part: slice) -> Tensor | None:
    return None if sizes is None else sizes[part]


# MERGED from mctf.hosts.timm_cait:
# timm's CaiT: talking heads, patches alone in the blocks, and a class token that reads them all afterwards.
#
# The class-attention stage gets one token per patch again, so that a fused token counts as often as it has patches.
#
# Axes: B images, H heads, N tokens, C channels.


class TimmCait(TimmHost):
    """One Cait model."""

    known: ClassVar = {LayerScaleBlock: (TalkingHeadAttn,)}

    @property
    def class_token(self) -> bool:
        return False

    @property
    def protected(self) -> int:
        return 0

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> "CaitOps":
        return CaitOps(block)

    def block_shape(self, block: Any) -> BlockShape:
        return replace(block_shape(block), mixing=macs_per_token(block.attn.proj_l, block.attn.proj_w))

    def head_cost(self, tokens: int) -> int:
        """The class-attention stage, the norm of the class token it makes, and the classifier."""
        model = self.model
        every = tokens + 1  # the class token reads itself too
        stage = sum(_class_attention(block, every, model.embed_dim) for block in model.blocks_token_only)
        return stage + macs_per_token(model.norm) + macs_per_token(model.head) * (1 if model.global_pool else every)


class CaitOps(GammaScaled):
    """The pieces of a LayerScaleBlock."""

    @property
    def talking(self) -> TalkingHeads:
        attn = self.block.attn
        return TalkingHeads(before=attn.proj_l, after=attn.proj_w, dropped=attn.attn_drop, scale=attn.scale)

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
        return self.talking.attend(q, k, v, sizes=sizes, unpool=unpool)

    def attention_received(
        self, q: Tensor, k: Tensor, *, sizes: Tensor | None, rows: str, keep: bool = False
    ) -> ReceivedAttention:
        return ReceivedAttention(self.talking.informativeness(q, k, sizes=sizes, rows=rows)[:, None])

    def attend_with_received(
        self, q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, rows: str
    ) -> tuple[Tensor, Tensor]:
        context, received = self.talking.attend_with_received(q, k, v, sizes=sizes, rows=rows)
        return context, received[:, None]

    def attention_map(self, q: Tensor, k: Tensor, *, sizes: Tensor | None) -> Tensor:
        return self.talking.map(q, k, sizes=sizes)

    def _drop_path(self, branch: int, x: Tensor) -> Tensor:
        return self.block.drop_path(x)


def _class_attention(block: Any, tokens: int, width: int) -> int:
    """One block of the class-attention stage on all tokens: norm, keys and values of each, two products, the rest."""
    attn = block.attn
    each = macs_per_token(block.norm1, attn.k, attn.v) + 2 * width
    return tokens * each + macs_per_token(attn.q, attn.proj, block.norm2, block.mlp)
