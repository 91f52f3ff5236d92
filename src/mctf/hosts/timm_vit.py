"""timm's VisionTransformer and everything built on it: DeiT, DINOv2, CLIP and SigLIP towers, ….

Axes: B images, H heads, N tokens, C channels, d channels a head.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionPoolLatent
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..core.cost import NORM, BlockShape
from ..core.places import Places
from ..errors import MctfError
from ..kernels.patches import PatchProduct, is_patch_convolution
from ..stack import FusedStack
from .attention import SoftmaxAttention
from .base import Architecture, refuse_arguments


@dataclass(eq=False)
class TimmViT:
    """One VisionTransformer. Heads are looked at when asked: `reset_classifier` may change them any time."""

    model: VisionTransformer

    @classmethod
    def of(cls, model: VisionTransformer) -> "TimmViT":
        """The host of this model; refuses what it would get wrong."""
        if not isinstance(model.blocks, FusedStack):
            _check_whole("blocks", model.blocks)
        for name, block in model.blocks.named_children():
            _check_block(f"blocks.{name}", block)
        return cls(model)

    @property
    def container(self) -> nn.Module:
        return self.model.blocks

    def install(self, stack: FusedStack) -> None:
        """Put the fused stack in the place of the blocks, and let a GPU embed patches by a matrix product."""
        self.model.blocks = stack
        if is_patch_convolution(getattr(self.model.patch_embed, "proj", None)):
            self.model.patch_embed.proj = PatchProduct.of(self.model.patch_embed.proj, stack.fuses)

    def uninstall(self, stack: FusedStack) -> None:
        """Undo `install`."""
        self.model.blocks = stack.restored()
        if isinstance(getattr(self.model.patch_embed, "proj", None), PatchProduct):
            self.model.patch_embed.proj = self.model.patch_embed.proj.restored()

    @property
    def image_size(self) -> tuple[int, int]:
        return tuple(self.model.patch_embed.img_size or (224, 224))

    @property
    def depth(self) -> int:
        return len(self.model.blocks)

    @property
    def class_token(self) -> bool:
        return self.model.has_class_token

    @property
    def protected(self) -> int:
        return self.model.num_prefix_tokens

    @property
    def reads_every_token(self) -> bool:
        return self.model.attn_pool is not None or self.model.global_pool != "token"

    @property
    def carries_places(self) -> bool:
        return False

    def arguments(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        return refuse_arguments(*args, **kwargs)

    def ops(self, block: nn.Module, arguments: Mapping[str, Any], places: Places | None) -> "PreNormOps":
        return PostNormOps(block) if isinstance(block, ResPostBlock) else PreNormOps(block)

    def architecture(self, image_size: tuple[int, int] | None) -> Architecture:
        model = self.model
        patches, stem = _stem(model, image_size or self.image_size)
        tokens = patches + model.num_prefix_tokens
        return Architecture(
            name=(getattr(model, "pretrained_cfg", None) or {}).get("architecture", type(model).__name__),
            tokens=tokens,
            protected=model.num_prefix_tokens,
            blocks=tuple(_block_shape(block) for block in model.blocks.children()),
            stem=stem + tokens * macs_per_token(model.norm_pre),
            head=_head(model, tokens),
            head_per_token=macs_per_token(model.norm),
            reads_every_token=self.reads_every_token,
        )


class PreNormOps(SoftmaxAttention):
    """The pieces of a timm `Block`, through its own modules."""

    def __init__(self, block: Any) -> None:
        self.block = block

    @property
    def scale(self) -> float:
        return self.block.attn.scale

    @property
    def attention_dropout(self) -> float:
        attn = self.block.attn
        return attn.attn_drop.p if attn.training else 0.0

    def plain(self, x: Tensor) -> Tensor:
        return self.block(x)

    def norm1(self, x: Tensor) -> Tensor:
        return self.block.norm1(x)

    def queries_keys(self, h: Tensor) -> tuple[Tensor, Tensor]:
        attn = self.block.attn
        flat = _part_of(attn.qkv, h, 0, 2 * attn.attn_dim)
        q, k = flat.unflatten(2, (2, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return attn.q_norm(q), attn.k_norm(k)

    def values(self, h: Tensor) -> Tensor:
        attn = self.block.attn
        return _part_of(attn.qkv, h, 2 * attn.attn_dim, 3 * attn.attn_dim)

    def queries_keys_values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attn = self.block.attn
        q, k, v = attn.qkv(h).unflatten(2, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return attn.q_norm(q), attn.k_norm(k), v

    def split_heads(self, flat: Tensor) -> Tensor:
        attn = self.block.attn
        return flat.unflatten(2, (attn.num_heads, attn.head_dim)).transpose(1, 2)

    def finish_context(self, context: Tensor, h: Tensor) -> Tensor:
        attn = self.block.attn
        context = attn.norm(context)
        gate = getattr(attn, "gate", None)
        return context if gate is None else context * gate(h).sigmoid()

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.block.drop_path1(self.block.ls1(self._project(context)))

    def add_mlp(self, x: Tensor) -> Tensor:
        block = self.block
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))

    def _project(self, context: Tensor) -> Tensor:
        attn = self.block.attn
        return attn.proj_drop(attn.proj(context))


class PostNormOps(PreNormOps):
    """The pieces of a timm `ResPostBlock`, whose norms follow attention and MLP."""

    def norm1(self, x: Tensor) -> Tensor:
        return x

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.block.drop_path1(self.block.norm1(self._project(context)))

    def add_mlp(self, x: Tensor) -> Tensor:
        block = self.block
        return x + block.drop_path2(block.norm2(block.mlp(x)))


def _part_of(linear: nn.Module, h: Tensor, start: int, stop: int) -> Tensor:
    """Output channels start .. stop of a linear layer, computing no others where that is safe.

    Anything but a bare nn.Linear (adapters, quantised or parametrised layers, hooks) is called whole.
    """
    if type(linear) is nn.Linear and not _has_hooks(linear):
        bias = None if linear.bias is None else linear.bias[start:stop]
        return F.linear(h, linear.weight[start:stop], bias)
    return linear(h)[..., start:stop]


def _check_block(name: str, block: Any) -> None:
    """Refuse a block whose forward is not the one the pieces rebuild."""
    if type(block) not in (Block, ResPostBlock):
        raise MctfError(
            f"{name} is a {type(block).__name__}, which mctf cannot fuse faithfully: "
            "use a model built of timm's Block or ResPostBlock"
        )
    if type(block.attn) is not Attention:
        raise MctfError(
            f"{name}.attn is a {type(block.attn).__name__}, which mctf cannot fuse faithfully: "
            "use a model with timm's plain Attention"
        )
    for path, module in ((name, block), (f"{name}.attn", block.attn), (f"{name}.attn.attn_drop", block.attn.attn_drop)):
        _check_whole(path, module)


def _check_whole(name: str, module: nn.Module) -> None:
    """Refuse a module that someone wants called as a whole: in a fused model it is not."""
    if _has_hooks(module):
        raise MctfError(f"{name} has hooks, which would not fire in a fused model: remove them first")
    if "forward" in vars(module):
        raise MctfError(f"{name}.forward was replaced, and would not be called in a fused model: restore it first")


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _stem(model: VisionTransformer, image_size: tuple[int, int]) -> tuple[int, int]:
    """Patches of an image and the multiply-adds of embedding them, from shapes alone."""
    height, width = image_size
    stem = copy.deepcopy(model.patch_embed).to("meta", torch.float32)
    with FlopCounterMode(display=False) as counter:
        try:
            patches = stem(torch.empty(1, getattr(model, "in_chans", 3), height, width, device="meta"))
        except (AssertionError, RuntimeError) as refusal:
            raise MctfError(
                f"the model does not take {height}x{width} images ({refusal}): "
                f"create it with img_size=({height}, {width}) or dynamic_img_size=True"
            ) from None
    return patches.numel() // model.embed_dim, counter.get_total_flops() // 2 + _stem_norm(stem, patches)


def _stem_norm(stem: nn.Module, patches: Tensor) -> int:
    return NORM * patches.numel() if isinstance(getattr(stem, "norm", None), nn.LayerNorm) else 0


def _block_shape(block: Any) -> BlockShape:
    attn = block.attn
    gate = getattr(attn, "gate", None)
    return BlockShape(
        channels=attn.qkv.in_features,
        attention=attn.attn_dim,
        heads=attn.num_heads,
        mlp=macs_per_token(block.mlp),
        norms=macs_per_token(block.norm1) // NORM,
        norm_first=not isinstance(block, ResPostBlock),
        head_norms=(macs_per_token(attn.q_norm) + macs_per_token(attn.k_norm)) // NORM * attn.num_heads,
        context=macs_per_token(attn.norm) + (0 if gate is None else macs_per_token(gate)),
    )


def _head(model: VisionTransformer, tokens: int) -> int:
    """Multiply-adds of pooling and classifier; whatever reads more than the class token reads all tokens."""
    parts = [model.fc_norm, model.head] + ([model.head_dist] if hasattr(model, "head_dist") else [])
    classifier = sum(macs_per_token(part) for part in parts)
    if model.attn_pool is None:
        return classifier * (1 if model.global_pool else tokens)
    pooled = tokens if model.pool_include_prefix else tokens - model.num_prefix_tokens
    return classifier + _attention_pool(model.attn_pool, pooled, model.embed_dim)


def _attention_pool(pool: Any, tokens: int, width: int) -> int:
    if not isinstance(pool, AttentionPoolLatent):
        return 2 * tokens * tokens * width + tokens * macs_per_token(pool)
    fixed = sum(macs_per_token(part) for part in (pool.q, pool.proj, pool.norm, pool.mlp) if part is not None)
    return pool.latent_len * fixed + tokens * (macs_per_token(pool.kv) + 2 * pool.latent_len * width)


def macs_per_token(module: nn.Module) -> int:
    """Multiply-adds of the linear layers and LayerNorms inside a module for one token."""
    linear = sum(part.in_features * part.out_features for part in module.modules() if isinstance(part, nn.Linear))
    norms = [part for part in module.modules() if isinstance(part, nn.LayerNorm)]
    return linear + NORM * sum(math.prod(norm.normalized_shape) for norm in norms)
