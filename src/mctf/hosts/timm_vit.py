"""timm's VisionTransformer and everything built on it: DeiT, DINOv2, CLIP and SigLIP towers, ….

Axes: B images, H heads, N tokens, C channels, d channels a head.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionPoolLatent
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..core.cost import NORM, BlockShape
from ..errors import MctfError
from .base import Architecture


@dataclass(eq=False)
class TimmViT:
    """One VisionTransformer. Heads are looked at when asked: `reset_classifier` may change them any time."""

    model: VisionTransformer

    @classmethod
    def of(cls, model: nn.Module) -> "TimmViT":
        """The host of this model; refuses what it would get wrong."""
        family = type(model).__name__
        if not isinstance(model, VisionTransformer):
            raise MctfError(f"{family} is not built on timm's VisionTransformer, the timm family mctf can fuse")
        for name, block in model.blocks.named_children():
            _check_block(f"blocks.{name}", block)
        return cls(model)

    @property
    def container(self) -> nn.Module:
        return self.model.blocks

    @container.setter
    def container(self, blocks: nn.Module) -> None:
        self.model.blocks = blocks

    @property
    def depth(self) -> int:
        return len(self.model.blocks)

    @property
    def protected(self) -> int:
        return self.model.num_prefix_tokens

    @property
    def reads_every_token(self) -> bool:
        return self.model.attn_pool is not None or self.model.global_pool != "token"

    def ops(self, block: nn.Module) -> "PreNormOps":
        return PostNormOps(block) if isinstance(block, ResPostBlock) else PreNormOps(block)

    def architecture(self, image_size: tuple[int, int] | None) -> Architecture:
        model = self.model
        patches, stem = _stem(model, image_size)
        tokens = patches + model.num_prefix_tokens
        pool_fixed, pool_per_token = _attention_pool(model.attn_pool)
        heads = [model.fc_norm, model.head] + ([model.head_dist] if hasattr(model, "head_dist") else [])
        return Architecture(
            name=(getattr(model, "pretrained_cfg", None) or {}).get("architecture", type(model).__name__),
            tokens=tokens,
            protected=model.num_prefix_tokens,
            blocks=tuple(_block_shape(block) for block in model.blocks.children()),
            stem=stem + tokens * macs_per_token(model.norm_pre),
            head=pool_fixed + sum(macs_per_token(part) for part in heads),
            head_per_token=macs_per_token(model.norm) + pool_per_token,
            reads_every_token=self.reads_every_token,
        )


class PreNormOps:
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
    if type(linear) is nn.Linear and not linear._forward_hooks and not linear._forward_pre_hooks:
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
    for path, module in ((name, block), (f"{name}.attn", block.attn)):
        if module._forward_hooks or module._forward_pre_hooks:
            raise MctfError(f"{path} has forward hooks, which would not fire in a fused block: remove them first")


def _stem(model: VisionTransformer, image_size: tuple[int, int] | None) -> tuple[int, int]:
    """Patches of an image and the multiply-adds of embedding them, from shapes alone."""
    height, width = image_size or model.patch_embed.img_size or (224, 224)
    stem = copy.deepcopy(model.patch_embed).to("meta")
    with FlopCounterMode(display=False) as counter:
        try:
            patches = stem(torch.empty(1, model.in_chans, height, width, device="meta"))
        except AssertionError as refusal:
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
        head_norms=(macs_per_token(attn.q_norm) + macs_per_token(attn.k_norm)) // NORM * attn.num_heads,
        context=macs_per_token(attn.norm) + (0 if gate is None else macs_per_token(gate)),
    )


def _attention_pool(pool: Any) -> tuple[int, int]:
    """Multiply-adds of an attention-pooling head: fixed ones, and those for each token it reads."""
    if not isinstance(pool, AttentionPoolLatent):
        return 0, 0
    width = pool.kv.in_features
    fixed = sum(macs_per_token(part) for part in (pool.q, pool.proj, pool.norm, pool.mlp) if part is not None)
    return pool.latent_len * fixed, macs_per_token(pool.kv) + 2 * pool.latent_len * width


def macs_per_token(module: nn.Module) -> int:
    """Multiply-adds of the linear layers and LayerNorms inside a module for one token."""
    linear = sum(part.in_features * part.out_features for part in module.modules() if isinstance(part, nn.Linear))
    norms = [part for part in module.modules() if isinstance(part, nn.LayerNorm)]
    return linear + NORM * sum(math.prod(norm.normalized_shape) for norm in norms)
