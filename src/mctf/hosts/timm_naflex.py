"""timm's NaFlexVit: images of one size as one tensor, or patches of images of several sizes with padding.

Axes: B images, L tokens with padding, P patches with padding, S images with equally many patches, N tokens of them,
H heads, K numbers per position.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ..core.flops import BlockShape
from ..core.positions import TokenPositions
from ..core.sequences import SequenceGroup, Sequences, padded_sequences, real_tokens
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
        mask = kwargs.pop("attn_mask", None)
        refuse_arguments(*args, **kwargs)
        return {"rope": rope} if mask is None else {"rope": rope, "attn_mask": mask}

    def has_sequences(self, arguments: Mapping[str, Any]) -> bool:
        return "attn_mask" in arguments

    def sequences(self, x: Tensor, arguments: Mapping[str, Any]) -> Sequences:
        return padded_sequences(real_tokens(arguments["attn_mask"]))

    def call_whole(self, block: Any, x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        given = {name: value for name, value in arguments.items() if value is not None}
        return block(x, **given)

    def sequence_arguments(self, arguments: Mapping[str, Any], group: SequenceGroup) -> Mapping[str, Any]:
        """With the rotary table of the group's patches: P K, H P K or B H P K -> S H N K, with H or 1."""
        rope = arguments["rope"]
        if rope is None:
            return {"rope": None}
        while rope.dim() < 4:
            rope = rope[None]
        first = group.rows[:, None] * (rope.shape[2] + self.protected)
        patches = group.tokens[:, self.protected :] - first - self.protected
        own = rope if rope.shape[0] == 1 else rope[group.rows]
        return {"rope": own.expand(len(patches), -1, -1, -1).take_along_dim(patches[:, None, :, None], dim=2)}

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> TimmOps:
        if type(block) in timm_eva.BLOCKS:
            return timm_eva.eva_ops(block, arguments["rope"], positions)
        return timm_vit.vit_ops(block)

    def block_shape(self, block: Any) -> BlockShape:
        return timm_eva.eva_shape(block) if type(block) in timm_eva.BLOCKS else timm_vit.vit_shape(block)
