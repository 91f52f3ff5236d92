"""timm's models with relative position biases: Beit, and VisionTransformerRelPos with a table or a small MLP.

Their blocks add a bias to the attention logits of every pair of positions: one per block, one shared by all blocks, or
both. A fused token takes the mean over the positions it covers, as logits are linear in the bias.

Axes: B images, H heads, N tokens, M tokens after fusion.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from timm.models.beit import Attention, Block
from timm.models.vision_transformer_relpos import RelPosAttention, RelPosBlock, ResPostRelPosBlock
from torch import Tensor, nn

from ..core.assignment import Assignment
from ..core.flops import BlockShape
from ..core.positions import TokenPositions, positions_after
from ..methods.base import run_pieces
from ._inspect import count_on_meta
from .base import Architecture, refuse_arguments
from .timm_base import GammaScaleMixin, PostNormMixin, TimmHost, TimmOps, block_shape


class BiasedOps(TimmOps):
    """Base class: the pieces of a block for tokens at these positions.

    shared: the bias that the model passes to every block, H N N, or None.
    argument: the name of that parameter of the block's forward.
    """

    argument: ClassVar[str]

    def __init__(self, block: Any, shared: Tensor | None, positions: TokenPositions | None) -> None:
        super().__init__(block)
        self.shared = shared
        self.positions = positions
        self._bias: Tensor | None = None

    def full_bias(self) -> Tensor | None:
        """The bias of all pairs of input positions, H N N or 1 H N N."""
        raise NotImplementedError

    @property
    def bias(self) -> Tensor | None:
        """The full bias before any fusion, its means afterwards: B H M M."""
        if self._bias is None:
            full = self.full_bias()
            self._bias = full if full is None or self.positions is None else self.positions.mean_bias(full)
        return self._bias

    def plain(self, x: Tensor) -> Tensor:
        if self.positions is None:
            return self.block(x, **{self.argument: self.shared})
        return run_pieces(self, x, None)  # the block itself would add the bias of all positions

    def fused(self, assignment: Assignment, weights: Tensor) -> Self:
        return type(self)(self.block, self.shared, positions_after(self.positions, assignment, weights))


class BeitOps(GammaScaleMixin, BiasedOps):
    """The pieces of a Beit Block."""

    argument = "shared_rel_pos_bias"

    def full_bias(self) -> Tensor | None:
        if self.block.attn.relative_position_bias_table is None:
            return self.shared
        own = self.block.attn._get_rel_pos_bias()
        return own if self.shared is None else own + self.shared


class TimmBeit(TimmHost):
    """One Beit model."""

    block_classes: ClassVar = {Block: (Attention,)}

    @property
    def uses_positions(self) -> bool:
        blocks: list[Any] = list(self.container.children())
        own = any(block.attn.relative_position_bias_table is not None for block in blocks)
        return own or self.model.rel_pos_bias is not None

    def arguments(self, shared_rel_pos_bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        refuse_arguments(*args, **kwargs)
        return {"shared": shared_rel_pos_bias}

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> BeitOps:
        return BeitOps(block, arguments["shared"], positions)

    def block_shape(self, block: Any) -> BlockShape:
        return block_shape(block)


class RelPosOps(BiasedOps):
    """The pieces of a RelPosBlock."""

    argument = "shared_rel_pos"

    def full_bias(self) -> Tensor | None:
        own = self.block.attn.rel_pos
        return self.shared if own is None else own.get_bias()


class PostNormRelPosOps(PostNormMixin, RelPosOps):
    """The pieces of a ResPostRelPosBlock."""


class TimmRelPos(TimmHost):
    """One VisionTransformerRelPos."""

    block_classes: ClassVar = {RelPosBlock: (RelPosAttention,), ResPostRelPosBlock: (RelPosAttention,)}

    @property
    def uses_positions(self) -> bool:
        return True

    def arguments(self, shared_rel_pos: Tensor | None = None, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        refuse_arguments(*args, **kwargs)
        return {"shared": shared_rel_pos}

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> RelPosOps:
        kind = PostNormRelPosOps if isinstance(block, ResPostRelPosBlock) else RelPosOps
        return kind(block, arguments["shared"], positions)

    def block_shape(self, block: Any) -> BlockShape:
        return block_shape(block, norm_first=not isinstance(block, ResPostRelPosBlock))

    def architecture(self, image_size: tuple[int, int] | None) -> Architecture:
        """With the MLPs that compute the biases, once per pass."""
        shapes = super().architecture(image_size)
        modules = [self.model.shared_rel_pos, *(block.attn.rel_pos for block in self.model.blocks._modules.values())]
        costs = [count_on_meta(each, lambda empty: empty.get_bias())[1] for each in modules if each is not None]
        return replace(shapes, stem=shapes.stem + sum(costs))
