"""timm's BEiT: relative positions of each block, of all blocks, of both or of none.

Axes: H heads, N tokens.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from timm.models.beit import Attention, Block
from torch import Tensor, nn

from ..core.cost import BlockShape
from ..core.places import Places
from .base import refuse_arguments
from .timm_base import TimmHost
from .timm_biased import BiasedOps
from .timm_ops import GammaScaled, block_shape


class TimmBeit(TimmHost):
    """One Beit model."""

    known: ClassVar = {Block: (Attention,)}

    @property
    def carries_places(self) -> bool:
        blocks: list[Any] = list(self.container.children())
        own = any(block.attn.relative_position_bias_table is not None for block in blocks)
        return own or self.model.rel_pos_bias is not None

    def arguments(self, shared_rel_pos_bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        refuse_arguments(*args, **kwargs)
        return {"shared": shared_rel_pos_bias}

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], places: Places | None) -> "BeitOps":
        return BeitOps(block, arguments["shared"], places)

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
