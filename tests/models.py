"""A matrix of tiny timm Vision Transformers, one for each feature of the family that fusing could get wrong.

Every parameter gets a random value of a size that matters: a LayerScale of 1e-5, a class token of 0 or a uniform
attention would hide mistakes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import Attention, LayerNorm, RmsNorm, SwiGLU
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import Tensor, nn

DEPTH = 4
CLASSES = 10
_SIZES = {"img_size": 64, "patch_size": 8, "embed_dim": 48, "depth": DEPTH, "num_heads": 3, "mlp_ratio": 2}


def _vit(**features: Any) -> VisionTransformer:
    return VisionTransformer(**{**_SIZES, "num_classes": CLASSES, **features})


def _distilled(**features: Any) -> VisionTransformer:
    return VisionTransformerDistilled(**{**_SIZES, "num_classes": CLASSES, **features})


def _gated(**features: Any) -> VisionTransformer:
    """Gated attention with heads wider than the residual stream: timm's constructors offer neither."""
    model = _vit(**features)
    for block in model.blocks:
        block.attn = Attention(48, num_heads=3, attn_head_dim=20, qkv_bias=True, gated=True, norm_layer=LayerNorm)
    return model


_BUILDERS: dict[str, Callable[..., VisionTransformer]] = {
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
    "rms_norm": partial(_vit, norm_layer=RmsNorm, qk_norm=True),
}

NAMES = tuple(_BUILDERS)
METHODS = ("mctf", "mctf_exact", "tome")


def make(name: str, *, seed: int = 0, **features: Any) -> VisionTransformer:
    """The model of this name in evaluation mode, its parameters drawn by `seed`; `features` add to its own."""
    model = _BUILDERS[name](**features)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, module in model.named_modules():
            for parameter_name, parameter in module.named_parameters(recurse=False):
                _randomise(f"{path}.{parameter_name}", module, parameter, generator)
    return model.eval()


def make_images(model: VisionTransformer, batch: int, *, seed: int = 0, size: tuple[int, int] | None = None) -> Tensor:
    """Random images of the size and dtype that the model takes."""
    height, width = size or model.patch_embed.img_size
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(batch, 3, height, width, generator=generator).to(model.patch_embed.proj.weight.dtype)


def tokens_of(model: VisionTransformer) -> int:
    """Tokens entering the first block."""
    return model.patch_embed.num_patches + model.num_prefix_tokens


def equal_tokens(model: VisionTransformer, equal: int) -> Tensor:
    """Prefix tokens and runs of `equal` identical neighbours, in float64: 2 N C."""
    prefix, patches = model.num_prefix_tokens, 48
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randn(2, prefix + patches // equal, model.embed_dim, generator=generator, dtype=torch.float64)
    repeats = torch.tensor([1] * prefix + [equal] * (patches // equal))
    return tokens.repeat_interleave(repeats, dim=1)


def _randomise(path: str, module: nn.Module, parameter: Tensor, generator: torch.Generator) -> None:
    noise = torch.randn(parameter.shape, generator=generator)
    if path.endswith("bias"):
        parameter.copy_(0.2 * noise)
    elif isinstance(module, (nn.Linear, nn.Conv2d)):
        # queries and keys twice as long, so that the attention is far from uniform
        gain = 2.0 if path.endswith("qkv.weight") else 1.0
        parameter.copy_(gain * noise / parameter[0].numel() ** 0.5)
    elif parameter.dim() == 1:
        parameter.copy_(1 + 0.3 * noise)  # norms and LayerScale
    else:
        parameter.copy_(0.5 * noise)  # class token, registers, positions, latent queries
