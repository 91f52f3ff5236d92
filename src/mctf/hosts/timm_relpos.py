"""timm's VisionTransformerRelPos: relative positions from a table or from a small MLP, of each block or of all.

Axes: H heads, N tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from timm.models.vision_transformer_relpos import RelPosAttention, RelPosBlock, ResPostRelPosBlock
from torch import Tensor, nn

from ..core.cost import BlockShape
from ..core.places import Places
from .base import Architecture, refuse_arguments
from .common import run_on_shapes
from .timm_base import TimmHost
from .timm_biased import BiasedOps
from .timm_ops import PostNorm, block_shape


class TimmRelPos(TimmHost):
    """One VisionTransformerRelPos."""

    known: ClassVar = {RelPosBlock: (RelPosAttention,), ResPostRelPosBlock: (RelPosAttention,)}

    @property
    def carries_places(self) -> bool:
        return True

    def arguments(self, shared_rel_pos: Tensor | None = None, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        refuse_arguments(*args, **kwargs)
        return {"shared": shared_rel_pos}

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], places: Places | None) -> BiasedOps:
        kind = PostNormRelPosOps if isinstance(block, ResPostRelPosBlock) else RelPosOps
        return kind(block, arguments["shared"], places)

    def block_shape(self, block: Any) -> BlockShape:
        return block_shape(block, norm_first=not isinstance(block, ResPostRelPosBlock))

    def architecture(self, image_size: tuple[int, int] | None) -> Architecture:
        """With the MLPs that make the biases, once a pass."""
        made = super().architecture(image_size)
        makers = [self.model.shared_rel_pos, *(block.attn.rel_pos for block in self.model.blocks.children())]
        biases = sum(run_on_shapes(maker, lambda maker: maker.get_bias())[1] for maker in makers if maker is not None)
        return replace(made, stem=made.stem + biases)


class RelPosOps(BiasedOps):
    """The pieces of a RelPosBlock."""

    argument = "shared_rel_pos"

    def every_pair(self) -> Tensor | None:
        own = self.block.attn.rel_pos
        return self.shared if own is None else own.get_bias()


class PostNormRelPosOps(PostNorm, RelPosOps):
    """The pieces of a ResPostRelPosBlock."""
