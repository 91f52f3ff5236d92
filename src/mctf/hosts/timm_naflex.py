"""timm's NaFlexVit on batches of images of one size; batches of several sizes need masks and are refused."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ..core.flops import BlockShape
from ..core.positions import TokenPositions
from ..errors import MctfError
from . import timm_eva, timm_vit
from .base import refuse_arguments
from .timm_base import TimmHost, TimmOps


class TimmNaFlex(TimmHost):
    """One NaFlexVit. Its blocks are VisionTransformer's, or Eva's where it has rotary positions."""

    block_classes: ClassVar = {**timm_vit.BLOCKS, **timm_eva.BLOCKS}

    @property
    def embedding(self) -> Any:
        return self.model.embeds

    @property
    def image_size(self) -> tuple[int, int]:
        """The size of the learned grid of positions; for other sizes the model resamples it."""
        grid, (height, width) = self.embedding.pos_embed_grid_size or (14, 14), self.embedding.patch_size
        return grid[0] * height, grid[1] * width

    def num_patches(self, embedded: Any) -> int:
        tokens, _ = embedded
        return tokens.shape[1] - self.protected

    @property
    def class_token(self) -> bool:
        return self.model.has_class_token

    @property
    def uses_positions(self) -> bool:
        return self.model.rope is not None

    def arguments(self, *args: Any, rope: Tensor | None = None, **kwargs: Any) -> Mapping[str, Any]:
        if kwargs.pop("attn_mask", None) is not None:
            raise MctfError(
                "a fused NaFlexVit takes no attention mask, and padded patches need one: "
                "give images of one size as one tensor, or run mctf.unfuse(model)"
            )
        refuse_arguments(*args, **kwargs)
        return {"rope": rope}

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> TimmOps:
        if type(block) in timm_eva.BLOCKS:
            return timm_eva.eva_ops(block, arguments["rope"], positions)
        return timm_vit.vit_ops(block)

    def block_shape(self, block: Any) -> BlockShape:
        return timm_eva.eva_shape(block) if type(block) in timm_eva.BLOCKS else timm_vit.vit_shape(block)
