"""Tiny timm VisionTransformers, one for each feature of the family that fusing could get wrong."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from timm.layers import Attention, HybridEmbed, LayerNorm, RmsNorm, SwiGLU
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from timm.models.vitamin import GeGluMlp, MbConvStages, VitCfg
from torch import Tensor, nn

from helpers.families.base import CLASSES, DEPTH, Family
from helpers.reference_blocks import Cover, Pieces, PostNormed, heads_of, normed_and_gated

SIZES = {"img_size": 64, "patch_size": 8, "embed_dim": 48, "depth": DEPTH, "num_heads": 3, "mlp_ratio": 2}


def _vit(**features: Any) -> VisionTransformer:
    return VisionTransformer(**{**SIZES, "num_classes": CLASSES, **features})


def _distilled(**features: Any) -> VisionTransformer:
    return VisionTransformerDistilled(**{**SIZES, "num_classes": CLASSES, **features})


def _gated(**features: Any) -> VisionTransformer:
    """Gated attention with heads wider than the residual stream: timm's constructors offer neither."""
    model = _vit(**features)
    for block in model.blocks:
        block.attn = Attention(48, num_heads=3, attn_head_dim=20, qkv_bias=True, gated=True, norm_layer=LayerNorm)
    return model


def _vitamin(**features: Any) -> VisionTransformer:
    """ViTamin: convolutions make the patches, and the MLP has a norm and a gate."""
    stages = MbConvStages(VitCfg(embed_dim=(16, 24, 48), depths=(1, 1, 1), stem_width=16))
    stem = partial(HybridEmbed, backbone=stages, proj=False)
    own = {"img_size": 128, "patch_size": 1, "embed_layer": stem, "mlp_layer": GeGluMlp, "class_token": False}
    return _vit(**{**own, "global_pool": "avg", **features})


class TimmViT(Family):
    title = "timm `VisionTransformer`"
    models = "ViT, DeiT, DeiT-III, DINO, DINOv2, CLIP, SigLIP (2), MAE, BEiT v3, FlexiViT, AIMv2, ViTamin"
    classes = ("VisionTransformer",)
    builders: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {
        "plain": _vit,
        "odd": partial(_vit, img_size=72, num_heads=2),
        "distilled": _distilled,
        "layer_scale": partial(_vit, init_values=1.0),
        "qk_norm": partial(_vit, qk_norm=True),
        "registers": partial(_vit, reg_tokens=4, no_embed_class=True, init_values=1.0),
        "mean_pool": partial(_vit, class_token=False, global_pool="avg"),
        "mean_pool_prefix": partial(_vit, global_pool="avg", reg_tokens=1, fc_norm=False),
        "map_pool": partial(_vit, class_token=False, global_pool="map"),
        "map_pool_prefix": partial(_vit, reg_tokens=2, global_pool="map"),
        "norm_pre": partial(_vit, pre_norm=True, qkv_bias=False),
        "post_norm": partial(_vit, block_fn=ResPostBlock),
        "scale_norm": partial(_vit, scale_attn_norm=True, scale_mlp_norm=True),
        "gated": _gated,
        "dynamic": partial(_vit, dynamic_img_size=True),
        "swiglu": partial(_vit, mlp_layer=SwiGLU),
        "vitamin": _vitamin,
        "rms_norm": partial(_vit, norm_layer=RmsNorm, qk_norm=True),
    }
    chosen = ("registers", "qk_norm", "map_pool", "post_norm", "gated")

    def embed(self, model: VisionTransformer, images: Tensor) -> Tensor:
        return model.norm_pre(model._pos_embed(model.patch_embed(images)))

    def keeps_every_token(self, model: VisionTransformer) -> bool:
        return model.global_pool != "token"

    def pieces(self, model: VisionTransformer) -> list[Pieces]:
        return [(PostNorm if isinstance(block, ResPostBlock) else PreNorm)(block) for block in model.blocks]


class PreNorm(Pieces):
    """timm's Block."""

    def queries_keys(self, read: Tensor, cover: Cover) -> tuple[Tensor, Tensor]:
        q, k, _ = self.attn.qkv(read).chunk(3, dim=1)
        return self.attn.q_norm(heads_of(q, self.attn.num_heads)), self.attn.k_norm(heads_of(k, self.attn.num_heads))

    def values(self, read: Tensor) -> Tensor:
        return heads_of(self.attn.qkv(read).chunk(3, dim=1)[2], self.attn.num_heads)

    def finish(self, context: Tensor, read: Tensor) -> Tensor:
        return normed_and_gated(self.attn, context, read)

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.block.ls1(self.attn.proj(context))

    def add_mlp(self, x: Tensor) -> Tensor:
        return x + self.block.ls2(self.block.mlp(self.block.norm2(x)))


class PostNorm(PostNormed, PreNorm):
    """timm's ResPostBlock."""
