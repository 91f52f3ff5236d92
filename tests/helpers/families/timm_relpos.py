"""Tiny timm VisionTransformerRelPos: biases from a table and from an MLP, of each block and of all, both norms."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from timm.models.vision_transformer_relpos import ResPostRelPosBlock, VisionTransformerRelPos
from torch import Tensor, nn

from helpers.families import timm_vit
from helpers.families.base import CLASSES, Family, biases_at, positions_of_runs
from helpers.reference_blocks import Cover, Pieces, mean_pairs


def _relpos(**features: Any) -> VisionTransformerRelPos:
    return VisionTransformerRelPos(**{**timm_vit.SIZES, "num_classes": CLASSES, "init_values": 1.0, **features})


def _without_dropout(**features: Any) -> VisionTransformerRelPos:
    """timm's MLP of positions drops values in training whatever the options of the model."""
    model = _relpos(shared_rel_pos=True, rel_pos_dim=8, **features)
    model.shared_rel_pos.mlp.drop1.p = 0.0
    return model


class TimmRelPos(Family):
    title = "timm `VisionTransformerRelPos`"
    models = "ViTs with relative positions"
    classes = ("VisionTransformerRelPos",)
    builders: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {
        "relpos": partial(_relpos, rel_pos_type="bias", class_token=True, global_pool="token", qk_norm=True),
        "relpos_post_norm": partial(_without_dropout, block_fn=ResPostRelPosBlock),
    }
    chosen = ("relpos",)

    def embed(self, model: VisionTransformerRelPos, images: Tensor) -> Tensor:
        x = model.patch_embed(images)
        return x if model.cls_token is None else torch.cat([model.cls_token.expand(len(x), -1, -1), x], dim=1)

    def pieces(self, model: VisionTransformerRelPos) -> list[Pieces]:
        shared = model.shared_rel_pos
        kind = PostNorm if isinstance(model.blocks[0], ResPostRelPosBlock) else PreNorm
        return [kind(block, (shared or block.attn.rel_pos).get_bias()[0]) for block in model.blocks]

    def through_blocks(self, model: VisionTransformerRelPos, tokens: Tensor, *, equal: int) -> Tensor:
        positions = positions_of_runs(tokens.shape[1], equal, prefix=model.num_prefix_tokens)
        makers = [model.shared_rel_pos, *(block.attn.rel_pos for block in model.blocks.children())]
        with biases_at(positions, "get_bias", [maker for maker in makers if maker is not None]):
            shared = None if model.shared_rel_pos is None else model.shared_rel_pos.get_bias()
            for block in model.blocks:
                tokens = block(tokens, shared_rel_pos=shared)
        return tokens


class PreNorm(timm_vit.PreNorm):
    """RelPosBlock; every: the bias of every pair of positions, H N N."""

    def __init__(self, block: Any, every: Tensor) -> None:
        super().__init__(block)
        self.every = every

    def bias(self, cover: Cover) -> Tensor:
        return mean_pairs(self.every, cover)

    def finish(self, context: Tensor, read: Tensor) -> Tensor:
        return context


class PostNorm(timm_vit.PostNorm, PreNorm):
    """ResPostRelPosBlock."""
