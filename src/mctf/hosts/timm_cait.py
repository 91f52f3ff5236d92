"""timm's CaiT: talking heads, patches alone in the blocks, and a class token that reads them all afterwards.

The class-attention stage gets one token per patch again, so that a fused token counts as often as it has patches.

Axes: B images, H heads, N tokens, C channels.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from timm.models.cait import LayerScaleBlock, TalkingHeadAttn
from torch import Tensor, nn

from ..core.assignment import Assignment
from ..core.attention import Look
from ..core.cost import BlockShape
from ..core.places import Places
from ..core.talking import TalkingHeads
from .common import macs_per_token
from .timm_base import TimmHost
from .timm_ops import GammaScaled, block_shape


class TimmCait(TimmHost):
    """One Cait model."""

    known: ClassVar = {LayerScaleBlock: (TalkingHeadAttn,)}

    @property
    def class_token(self) -> bool:
        return False

    @property
    def protected(self) -> int:
        return 0

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], places: Places | None) -> "CaitOps":
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
        spread: Assignment | None = None,
        look: Look | None = None,
    ) -> Tensor:
        return self.talking.attend(q, k, v, sizes=sizes, spread=spread)

    def look_at(self, q: Tensor, k: Tensor, *, sizes: Tensor | None, rows: str, keep: bool = False) -> Look:
        return Look(self.talking.informativeness(q, k, sizes=sizes, rows=rows)[:, None])

    def attend_and_look(
        self, q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, rows: str
    ) -> tuple[Tensor, Tensor]:
        context, received = self.talking.attend_and_look(q, k, v, sizes=sizes, rows=rows)
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
