"""Tiny timm NaFlexVits on images of one size, with the blocks of VisionTransformer and with those of Eva."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from torch import Tensor, nn

from helpers.families import timm_eva, timm_vit
from helpers.families.base import CLASSES, Family
from helpers.reference_blocks import Pieces


def _naflex(**features: Any) -> NaFlexVit:
    sizes = {name: value for name, value in timm_vit.SIZES.items() if name != "img_size"}
    config = NaFlexVitCfg(**{**sizes, "pos_embed_grid_size": None, **features})
    return NaFlexVit(config, num_classes=CLASSES, img_size=64)


class TimmNaFlex(Family):
    title = "timm `NaFlexVit`"
    models = "NaFlexViT, SigLIP 2 NaFlex"
    classes = ("NaFlexVit",)
    builders: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {
        "naflex": partial(_naflex, class_token=True, reg_tokens=1, global_pool="token", init_values=1.0),
        "naflex_rope": partial(_naflex, rope_type="axial", global_pool="map", embed_proj_type="conv", pos_embed="none"),
    }
    chosen = ("naflex_rope",)

    def image_size(self, model: NaFlexVit) -> tuple[int, int]:
        return (64, 64)

    def tokens(self, model: NaFlexVit) -> int:
        return 64 + model.num_prefix_tokens

    def embed(self, model: NaFlexVit, images: Tensor) -> Tensor:
        return model._forward_embeds(images, patch_coord=None, patch_valid=None, attn_mask=None)["patches"]

    def pieces(self, model: NaFlexVit) -> list[Pieces]:
        if model.rope is None:
            return [timm_vit.PreNorm(block) for block in model.blocks]
        table = model.rope.get_embed(shape=(8, 8))
        return [timm_eva.piece(block, table) for block in model.blocks]

    def through_blocks(self, model: NaFlexVit, tokens: Tensor, *, equal: int) -> Tensor:
        if model.rope is None:
            return model.blocks(tokens)
        rope = timm_eva.rope_of_runs(tokens.shape[1] - model.num_prefix_tokens, equal, tokens)
        for block in model.blocks:
            tokens = block(tokens, rope=rope)
        return tokens
