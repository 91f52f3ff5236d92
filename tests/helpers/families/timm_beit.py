"""Tiny timm BEiTs: a position bias for each block, one for all blocks, both, or none."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from timm.models.beit import Beit
from torch import Tensor, nn

from helpers.families.base import CLASSES, Family, biases_at, positions_of_runs
from helpers.families.timm_vit import SIZES
from helpers.reference_blocks import Cover, Pieces, heads_of, mean_pairs, scaled


def _beit(**features: Any) -> Beit:
    return Beit(**{**SIZES, "num_classes": CLASSES, "init_values": 1.0, **features})


def _separate(**features: Any) -> Beit:
    """Biases of q and v added after the product: timm's constructor does not offer it."""
    model = _beit(use_rel_pos_bias=True, use_shared_rel_pos_bias=True, use_abs_pos_emb=False, **features)
    for block in model.blocks:
        block.attn.qkv_bias_separate = True
    return model


GLU = {"swiglu_mlp": True, "scale_mlp": True, "qkv_bias": False}


class TimmBeit(Family):
    title = "timm `Beit`"
    models = "BEiT, BEiT v2"
    classes = ("Beit",)
    builders: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {
        "beit": partial(_beit, use_rel_pos_bias=True, use_abs_pos_emb=False, img_size=72),
        "beit_shared": partial(_beit, use_shared_rel_pos_bias=True, init_values=None, global_pool="token", **GLU),
        "beit_both": _separate,
    }
    chosen = ("beit", "beit_shared")

    def embed(self, model: Beit, images: Tensor) -> Tensor:
        x = model.patch_embed(images)
        x = torch.cat([model.cls_token.expand(len(x), -1, -1), x], dim=1)
        return x if model.pos_embed is None else x + model.pos_embed

    def pieces(self, model: Beit) -> list[Pieces]:
        shared = 0.0 if model.rel_pos_bias is None else pairs_of(model.rel_pos_bias)
        return [PreNorm(block, shared) for block in model.blocks]

    def through_blocks(self, model: Beit, tokens: Tensor, *, equal: int) -> Tensor:
        positions = positions_of_runs(tokens.shape[1], equal, prefix=1)
        own = [block.attn for block in model.blocks if block.attn.relative_position_bias_table is not None]
        shared = None if model.rel_pos_bias is None else model.rel_pos_bias()[:, positions][..., positions]
        with biases_at(positions, "_get_rel_pos_bias", own):
            for block in model.blocks:
                tokens = block(tokens, shared_rel_pos_bias=shared)
        return tokens


def pairs_of(part: Any) -> Tensor:
    """The bias of every pair of positions: H N N."""
    return part.relative_position_bias_table[part.relative_position_index].permute(2, 0, 1)


class PreNorm(Pieces):
    """Beit's Block; shared: the bias of all blocks, H N N or 0."""

    def __init__(self, block: Any, shared: Tensor | float) -> None:
        super().__init__(block)
        self.shared = shared

    def queries_keys(self, read: Tensor, cover: Cover) -> tuple[Tensor, Tensor]:
        q, k, _ = self.attn.qkv(read).chunk(3, dim=1)
        if self.attn.q_bias is not None:
            q = q + self.attn.q_bias
        return heads_of(q, self.attn.num_heads), heads_of(k, self.attn.num_heads)

    def values(self, read: Tensor) -> Tensor:
        v = self.attn.qkv(read).chunk(3, dim=1)[2]
        return heads_of(v if self.attn.v_bias is None else v + self.attn.v_bias, self.attn.num_heads)

    def bias(self, cover: Cover) -> Tensor | float:
        every = self.shared
        if self.attn.relative_position_bias_table is not None:
            every = every + pairs_of(self.attn)
        return mean_pairs(every, cover) if isinstance(every, Tensor) else 0.0

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + scaled(self.attn.proj(context), self.block.gamma_1)

    def add_mlp(self, x: Tensor) -> Tensor:
        return x + scaled(self.block.mlp(self.block.norm2(x)), self.block.gamma_2)
