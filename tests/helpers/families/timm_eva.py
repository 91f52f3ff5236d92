"""Tiny timm Eva models: rotary positions in all their layouts, separate biases, both kinds of attention and block."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from timm.models.eva import Eva, EvaAttention, EvaBlockPostNorm
from torch import Tensor, nn

from helpers.families.base import CLASSES, Family
from helpers.families.timm_vit import SIZES
from helpers.reference_blocks import Cover, Pieces, PostNormed, heads_of, mean_rows, normed_and_gated, scaled


def _eva(**features: Any) -> Eva:
    return Eva(**{**SIZES, "num_classes": CLASSES, "use_rot_pos_emb": True, **features})


def _fused_product(**features: Any) -> Eva:
    """One product for q, k and v, their biases added in both ways; timm's constructors offer only one."""
    model = _eva(scale_attn_inner=True, num_reg_tokens=1, dynamic_img_size=True, ref_feat_shape=(6, 6), **features)
    model.blocks[0].attn.qkv_bias_separate = True
    return model


def _mixed(**features: Any) -> Eva:
    """Tables of each block and head. timm computes them in float32 whatever the model is cast to, coordinates too."""
    model = _eva(attn_type="rope", rope_type="mixed", no_embed_class=True, init_values=1.0, **features)
    for name in ("t_x", "t_y"):  # no longer buffers, which a cast would change
        coordinates = getattr(model.rope, name)
        delattr(model.rope, name)
        setattr(model.rope, name, coordinates)
    return model


DINOV3 = {
    "attn_type": "rope",
    "rope_type": "dinov3",
    "rope_rotate_half": True,
    "num_reg_tokens": 4,
    "init_values": 1.0,
    "use_abs_pos_emb": False,
    "rope_grid_offset": 0.0,
    "qkv_bias": False,
    "qkv_fused": False,
}
PE = {
    "attn_type": "rope",
    "global_pool": "map",
    "use_pre_transformer_norm": True,
    "use_post_transformer_norm": True,
    "use_fc_norm": False,
    "init_values": 1.0,
    "rope_grid_indexing": "xy",
}


# Several query heads on one key, and a LayerScale of the attention alone, where timm has them.
NEWER = {"num_kv_heads": 1, "qk_norm": True, "attn_only_layer_scale": True}
SHARED_KEYS = {name: value for name, value in NEWER.items() if name in inspect.signature(Eva).parameters}


class TimmEva(Family):
    title = "timm `Eva`"
    models = "EVA, EVA-02, DINOv3, Perception Encoder, RoPE-ViT, Sapiens 2"
    classes = ("Eva",)
    builders: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {
        "eva02": partial(_eva, qkv_fused=False, swiglu_mlp=True, scale_mlp=True, global_pool="token", img_size=72),
        "eva_fused_product": _fused_product,
        "eva_post_norm": partial(_eva, use_post_norm=True, use_rot_pos_emb=False, class_token=False, swiglu_mlp=True),
        "eva_dinov3": partial(_eva, **DINOV3, **SHARED_KEYS, global_pool="token"),
        "eva_pe": partial(_eva, **PE),
        "eva_rope_mixed": _mixed,
    }
    chosen = ("eva02", "eva_rope_mixed")

    def embed(self, model: Eva, images: Tensor) -> Tensor:
        return model.norm_pre(model._pos_embed(model.patch_embed(images))[0])

    def pieces(self, model: Eva) -> list[Pieces]:
        table = None if model.rope is None else model.rope.get_embed(*dynamic_shape(model))
        tables = table if model.rope_mixed else [table] * len(model.blocks)
        return [piece(block, own) for block, own in zip(model.blocks, tables, strict=True)]

    def uncounted(self, model: Eva) -> int:
        """The mixed tables: two products of all coordinates with frequencies, as far as fvcore sees them."""
        return 2 * model.patch_embed.num_patches * model.rope.freqs.shape[-1] if model.rope_mixed else 0

    def through_blocks(self, model: Eva, tokens: Tensor, *, equal: int) -> Tensor:
        rope = None if model.rope is None else rope_of_runs(tokens.shape[1] - model.num_prefix_tokens, equal, tokens)
        for block in model.blocks:
            tokens = block(tokens, rope=rope)
        return tokens


def dynamic_shape(model: Eva) -> list[tuple[int, int]]:
    """Arguments of the rotary tables in a model for images of any size."""
    return [model.patch_embed.grid_size] if model.dynamic_img_size else []


def rope_of_runs(patches: int, equal: int, like: Tensor, channels: int = 16) -> Tensor:
    """A table of sines and cosines with the same row for `equal` neighbours: P 2d."""
    angles = torch.randn(patches // equal, channels, generator=torch.Generator().manual_seed(11))
    return torch.cat([angles.sin(), angles.cos()], dim=1).repeat_interleave(equal, dim=0).to(like.dtype)


def piece(block: Any, table: Tensor | None) -> Pieces:
    return (PostNorm if isinstance(block, EvaBlockPostNorm) else PreNorm)(block, table)


class PreNorm(Pieces):
    """EvaBlock; table: sines and cosines of every patch, P 2d or H P 2d."""

    def __init__(self, block: Any, table: Tensor | None) -> None:
        super().__init__(block)
        self.table = table

    def queries_keys(self, read: Tensor, cover: Cover) -> tuple[Tensor, Tensor]:
        q, k, _ = self.qkv(read)
        return self.rotated(self.attn.q_norm(q), cover), self.rotated(self.attn.k_norm(k), cover)

    def values(self, read: Tensor) -> Tensor:
        return self.qkv(read)[2]

    def qkv(self, read: Tensor) -> list[Tensor]:
        attn = self.attn
        if attn.qkv is None:
            flat = [attn.q_proj(read), attn.k_proj(read), attn.v_proj(read)]
        else:
            flat = list(attn.qkv(read).chunk(3, dim=1))
            if isinstance(attn, EvaAttention) and attn.q_bias is not None:
                flat[0], flat[2] = flat[0] + attn.q_bias, flat[2] + attn.v_bias
        size = flat[0].shape[1] // attn.num_heads
        heads = [heads_of(part, part.shape[1] // size) for part in flat]
        return [part.repeat_interleave(attn.num_heads // len(part), dim=0) for part in heads]

    def rotated(self, x: Tensor, cover: Cover) -> Tensor:
        """Channels a and b of each pair (x_a, x_b) -> (x_a cos - x_b sin, x_b cos + x_a sin); H N d."""
        if self.table is None:
            return x
        sin, cos = self.table.chunk(2, dim=-1)
        prefix = (self.attn.num_prefix_tokens, sin.shape[-1])  # not rotated: an angle of 0
        front = [*sin.shape[:-2], *prefix]
        sin = mean_rows(torch.cat([sin.new_zeros(front), sin], dim=-2), cover)
        cos = mean_rows(torch.cat([cos.new_ones(front), cos], dim=-2), cover)
        pairs = x.unflatten(2, (2, -1)).transpose(2, 3) if self.attn.rotate_half else x.unflatten(2, (-1, 2))
        other = torch.stack([-pairs[..., 1], pairs[..., 0]], dim=-1)
        other = (other.transpose(2, 3) if self.attn.rotate_half else other).flatten(2)
        return x * cos + other * sin

    def finish(self, context: Tensor, read: Tensor) -> Tensor:
        return normed_and_gated(self.attn, context, read)

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + scaled(self.attn.proj(context), self.block.gamma_1)

    def add_mlp(self, x: Tensor) -> Tensor:
        return x + scaled(self.block.mlp(self.block.norm2(x)), self.block.gamma_2)


class PostNorm(PostNormed, PreNorm):
    """EvaBlockPostNorm."""
