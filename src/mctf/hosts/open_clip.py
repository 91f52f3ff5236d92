"""open_clip's own Vision Transformers (ViT-B-32 and the like), alone or as the `visual` of a CLIP or CoCa model.

Its transformer iterates over its blocks, so whatever follows gets one token per input token. Text towers and decoders
are unchanged. Models with an image tower of timm hold a timm model, `model.visual.trunk`, to be fused there.

Axes: B images, H heads, N tokens, d channels per head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from open_clip.transformer import Attention, CustomResidualAttentionBlock, ResidualAttentionBlock, VisionTransformer
from torch import Tensor, nn

from ..core.flops import NORM, BlockShape
from ..core.positions import TokenPositions
from ..errors import MctfError
from ..stack import FusedStack
from ._inspect import can_slice, check_unsharded, check_whole, count_on_meta, macs_per_token
from .base import Architecture, Host, SoftmaxAttention
from .patch_embed import MatmulPatchEmbed, is_patch_convolution

_BLOCKS = {ResidualAttentionBlock: nn.MultiheadAttention, CustomResidualAttentionBlock: Attention}


@dataclass(eq=False)
class OpenClipViT(Host):
    """One VisionTransformer. model: the fused model; tower: the VisionTransformer in it."""

    model: nn.Module
    tower: Any

    @classmethod
    def of(cls, model: Any) -> "OpenClipViT":
        """The host of this model; raises MctfError for blocks that it would not reproduce."""
        tower = model if isinstance(model, VisionTransformer) else model.visual
        host = cls(model, tower)
        prefix = "" if model is tower else "visual."
        if not tower.transformer.batch_first:
            raise MctfError(
                f"{prefix}transformer takes tokens before images, and mctf images before tokens: use open_clip_torch "
                ">= 2.26"
            )
        if not isinstance(host.container, FusedStack):
            check_whole(f"{prefix}transformer.resblocks", host.container)
        for name, block in host.container.named_children():
            _check_block(f"{prefix}transformer.resblocks.{name}", block)
        return host

    @property
    def container(self) -> nn.Module:
        return self.tower.transformer.resblocks

    def install(self, stack: FusedStack) -> None:
        """Replace the blocks by the fused stack, and the patch convolution by a matrix product on GPUs."""
        self.tower.transformer.resblocks = stack
        if is_patch_convolution(self.tower.conv1):
            self.tower.conv1 = MatmulPatchEmbed.of(self.tower.conv1, stack.fuses)

    def uninstall(self, stack: FusedStack) -> None:
        """Undo `install`."""
        self.tower.transformer.resblocks = stack.restored()
        if isinstance(self.tower.conv1, MatmulPatchEmbed):
            self.tower.conv1 = self.tower.conv1.restored()

    @property
    def image_size(self) -> tuple[int, int]:
        return tuple(self.tower.image_size)

    @property
    def class_token(self) -> bool:
        return True

    @property
    def protected(self) -> int:
        return 1

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> "OpenClipOps":
        return CustomOps(block) if type(block) is CustomResidualAttentionBlock else OpenClipOps(block)

    def architecture(self, image_size: tuple[int, int] | None) -> Architecture:
        """The cost of the image tower: its blocks by their shapes, the rest by a run on the meta device."""
        tower, size = self.tower, image_size or self.image_size
        if size != self.image_size:
            raise MctfError(
                f"the model does not take {size[0]}x{size[1]} images: create it with force_image_size=({size[0]}, "
                f"{size[1]})"
            )
        tokens = tower.grid_size[0] * tower.grid_size[1] + 1
        width = tower.conv1.out_channels
        stem = (tokens - 1) * tower.conv1.weight.numel() + tokens * macs_per_token(tower.ln_pre)

        def read(empty: Any) -> Tensor:
            pooled, _ = empty._pool(empty.conv1.weight.new_empty(1, tokens, width))
            return pooled if empty.proj is None else pooled @ empty.proj

        _, head = count_on_meta(tower, read)
        return Architecture(
            name=type(self.model).__name__,
            tokens=tokens,
            protected=1,
            blocks=tuple(self.ops(block, {}, None).shape() for block in self.container.children()),
            stem=stem,
            head=head,  # one token per input token is read, so the cost does not depend on the fusion
            head_per_token=0,
            reads_every_token=True,
        )


def _check_block(name: str, block: Any) -> None:
    """Raise MctfError for a block whose forward is not the composition of the pieces."""
    check_unsharded(name, block)
    if type(block) not in _BLOCKS:
        names = " or ".join(cls.__name__ for cls in _BLOCKS)
        raise MctfError(
            f"{name} is a {type(block).__name__}, which mctf cannot fuse faithfully: use a model with open_clip's "
            f"{names}"
        )
    if type(block.attn) is not _BLOCKS[type(block)]:
        raise MctfError(
            f"{name}.attn is a {type(block.attn).__name__}, which mctf cannot fuse faithfully: use a model with "
            f"{_BLOCKS[type(block)].__name__}"
        )
    for path in ("", ".attn"):
        check_whole(f"{name}{path}", block.get_submodule(path[1:]))
    attn = block.attn
    if getattr(attn, "logit_scale", None) is not None:
        raise MctfError(f"{name}.attn is a cosine attention, which mctf cannot fuse: create the model without it")
    if hasattr(block, "ln_1_kv") or getattr(attn, "bias_k", None) is not None or getattr(attn, "add_zero_attn", False):
        raise MctfError(f"{name} attends to other tokens than its own, which mctf cannot fuse")


class OpenClipOps(SoftmaxAttention):
    """The pieces of a ResidualAttentionBlock, whose attention is PyTorch's."""

    def __init__(self, block: Any) -> None:
        self.block = block

    @property
    def scale(self) -> float:
        return self.block.attn.head_dim**-0.5

    @property
    def attention_dropout(self) -> float:
        attn = self.block.attn
        return float(attn.dropout) if attn.training else 0.0

    def plain(self, x: Tensor) -> Tensor:
        return self.block(x)

    def norm1(self, x: Tensor) -> Tensor:
        return self.block.ln_1(x)

    def queries_keys(self, h: Tensor) -> tuple[Tensor, Tensor]:
        q, k = map(self.split_heads, self._project(h, 0, 2).chunk(2, dim=2))
        return self.normed(q, k)

    def values(self, h: Tensor) -> Tensor:
        return self._project(h, 2, 3)

    def queries_keys_values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.split_heads, self._project(h, 0, 3).chunk(3, dim=2))
        return *self.normed(q, k), v

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys after their norms; here there are none."""
        return q, k

    def split_heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(2, (self.block.attn.num_heads, -1)).transpose(1, 2)

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.block.ls_1(self.block.attn.out_proj(context))

    def add_mlp(self, x: Tensor) -> Tensor:
        return x + self.block.ls_2(self.block.mlp(self.block.ln_2(x)))

    def shape(self) -> BlockShape:
        """The shapes that determine the cost of the block."""
        attn = self.block.attn
        return BlockShape(
            channels=attn.out_proj.out_features,
            attention=attn.out_proj.in_features,
            heads=attn.num_heads,
            mlp=macs_per_token(self.block.mlp),
            norms=macs_per_token(self.block.ln_1) // NORM,
        )

    def _project(self, h: Tensor, first: int, last: int) -> Tensor:
        """Parts first .. last of q, k and v, side by side."""
        attn = self.block.attn
        width, weight, bias = attn.out_proj.in_features, attn.in_proj_weight, attn.in_proj_bias
        start, stop = first * width, last * width
        if not can_slice(weight):
            return F.linear(h, weight, bias)[..., start:stop]
        return F.linear(h, weight[start:stop], None if bias is None else bias[start:stop])


class CustomOps(OpenClipOps):
    """The pieces of a CustomResidualAttentionBlock: optional norms of q and k, of the context, and scales of heads."""

    @property
    def attention_dropout(self) -> float:
        attn = self.block.attn
        return attn.attn_drop.p if attn.training else 0.0

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.block.attn.ln_q(q), self.block.attn.ln_k(k)

    def finish_context(self, context: Tensor, h: Tensor) -> Tensor:
        attn = self.block.attn
        if attn.head_scale is not None:
            context = (context.unflatten(2, (attn.num_heads, -1)) * attn.head_scale.flatten()[:, None]).flatten(2)
        return attn.ln_inner(context)

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        attn = self.block.attn
        return x + self.block.ls_1(self.block.ln_attn(attn.out_drop(attn.out_proj(context))))

    def shape(self) -> BlockShape:
        attn = self.block.attn
        head_norms = macs_per_token(attn.ln_q, attn.ln_k) // NORM * attn.num_heads
        after = macs_per_token(attn.ln_inner, self.block.ln_attn)
        return replace(super().shape(), head_norms=head_norms, context=after)
