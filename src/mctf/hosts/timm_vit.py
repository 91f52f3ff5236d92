"""timm's VisionTransformer and its subclasses: DeiT, DINOv2, CLIP and SigLIP towers, ViTamin, …."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from timm.layers import Attention
from timm.models.vision_transformer import Block, ResPostBlock
from torch import nn

from ..core.flops import BlockShape
from ..core.positions import TokenPositions
from ..stack import FusedStack, HeadReads
from ._inspect import macs_per_token
from .base import Architecture
from .timm_base import BlockClasses, PostNormMixin, TimmHost, TimmOps, block_shape

BLOCKS: BlockClasses = {Block: (Attention,), ResPostBlock: (Attention,)}


class TimmViT(TimmHost):
    """One VisionTransformer."""

    block_classes: ClassVar = BLOCKS

    @property
    def class_token(self) -> bool:
        return self.model.has_class_token

    @property
    def reads_every_token(self) -> bool:
        return self.model.attn_pool is not None or self.model.global_pool != "token"

    @property
    def reads_protected_only(self) -> bool:
        """LV-ViT's second classifier reads the other tokens."""
        second_head = getattr(self.model, "aux_head", None)
        return not self.reads_every_token and second_head is None

    @property
    def after_blocks(self) -> Sequence[nn.Module]:
        model = self.model
        return model.norm, model.fc_norm, model.head_drop

    def install(self, stack: FusedStack) -> None:
        super().install(stack)
        HeadReads.attach(self.model, stack)

    def uninstall(self, stack: FusedStack) -> None:
        super().uninstall(stack)
        HeadReads.detach(self.model)

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> TimmOps:
        return vit_ops(block)

    def block_shape(self, block: Any) -> BlockShape:
        return vit_shape(block)

    def architecture(self, image_size: tuple[int, int] | None) -> Architecture:
        """With LV-ViT's second classifier, which reads every token but the protected ones."""
        second_head = macs_per_token(getattr(self.model, "aux_head", None))
        return replace(super().architecture(image_size), second_head=second_head)


class PostNormOps(PostNormMixin, TimmOps):
    """The pieces of a ResPostBlock."""


def vit_ops(block: nn.Module) -> TimmOps:
    """The pieces of a block of one of BLOCKS."""
    return PostNormOps(block) if isinstance(block, ResPostBlock) else TimmOps(block)


def vit_shape(block: Any) -> BlockShape:
    return block_shape(block, norm_first=not isinstance(block, ResPostBlock))
