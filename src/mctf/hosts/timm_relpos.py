"""Blocks of timm that add a bias to the attention logits of every pair of positions: those with relative positions.

A fused token takes the mean over the pairs of positions that two tokens cover, as logits are linear in the bias.

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
from ._inspect import run_on_shapes
from .base import Architecture, refuse_arguments
from .timm_base import GammaScaled, PostNorm, TimmHost, TimmOps, block_shape


class BiasedOps(TimmOps):
    """A block on tokens at these positions; shared: what all blocks are called with, a bias of H N N or None.

    A subclass says how the block is called with it, and what it adds of its own.
    """

    argument: str

    def __init__(self, block: Any, shared: Tensor | None, positions: TokenPositions | None) -> None:
        super().__init__(block)
        self.shared = shared
        self.positions = positions
        self._bias: Tensor | None = None

    def every_pair(self) -> Tensor | None:
        """The bias of all positions of the input, H N N or 1 H N N."""
        raise NotImplementedError

    @property
    def bias(self) -> Tensor | None:
        """That bias while nothing was fused, then its means: B H M M."""
        if self._bias is None:
            every = self.every_pair()
            self._bias = every if every is None or self.positions is None else self.positions.mean_bias(every)
        return self._bias

    def plain(self, x: Tensor) -> Tensor:
        if self.positions is None:
            return self.block(x, **{self.argument: self.shared})
        return run_pieces(self, x, None)  # the block itself would add the bias of all positions

    def fused(self, assignment: Assignment, weights: Tensor) -> Self:
        return type(self)(self.block, self.shared, positions_after(self.positions, assignment, weights))


# MERGED from mctf.hosts.timm_relpos:
# timm's BEiT: relative positions of each block, of all blocks, of both or of none.
#
# Axes: H heads, N tokens.


class TimmBeit(TimmHost):
    """One Beit model."""

    known: ClassVar = {Block: (Attention,)}

    @property
    def uses_positions(self) -> bool:
        blocks: list[Any] = list(self.container.children())
        own = any(block.attn.relative_position_bias_table is not None for block in blocks)
        return own or self.model.rel_pos_bias is not None

    def arguments(self, shared_rel_pos_bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        refuse_arguments(*args, **kwargs)
        return {"shared": shared_rel_pos_bias}

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> "BeitOps":
        return BeitOps(block, arguments["shared"], positions)

    def block_shape(self, block: Any) -> BlockShape:
        return block_shape(block)


class BeitOps(GammaScaled, BiasedOps):
    """The pieces of a Beit block."""

    argument = "shared_rel_pos_bias"

    def every_pair(self) -> Tensor | None:
        if self.block.attn.relative_position_bias_table is None:
            return self.shared
        own = self.block.attn._get_rel_pos_bias()
        return own if self.shared is None else own + self.shared


# MERGED from mctf.hosts.timm_relpos:
# timm's VisionTransformerRelPos: relative positions from a table or from a small MLP, of each block or of all.
#
# Axes: H heads, N tokens.


class TimmRelPos(TimmHost):
    """One VisionTransformerRelPos."""

    known: ClassVar = {RelPosBlock: (RelPosAttention,), ResPostRelPosBlock: (RelPosAttention,)}

    @property
    def uses_positions(self) -> bool:
        return True

    def arguments(self, shared_rel_pos: Tensor | None = None, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        refuse_arguments(*args, **kwargs)
        return {"shared": shared_rel_pos}

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> BiasedOps:
        kind = PostNormRelPosOps if isinstance(block, ResPostRelPosBlock) else RelPosOps
        return kind(block, arguments["shared"], positions)

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
