"""Which features a model has that fusing could get wrong, read off its modules and parameters."""

import re
from collections.abc import Callable
from typing import Any

from torch import nn


def _parameter(pattern: str) -> Callable[[Any], bool]:
    return lambda model: any(re.search(pattern, name) for name, _ in model.named_parameters())


def _module(pattern: str) -> Callable[[Any], bool]:
    """A module whose class is so named."""
    return lambda model: any(re.search(pattern, type(module).__name__) for module in model.modules())


def _setting(name: str, value: object) -> Callable[[Any], bool]:
    """An attribute of the model or an amount of its config."""
    return lambda model: value in (getattr(model, name, None), getattr(getattr(model, "config", None), name, None))


def _several_convolutions(model: nn.Module) -> bool:
    return sum(isinstance(module, nn.Conv2d) for module in model.modules()) > 1


FEATURES: dict[str, Callable[[Any], bool]] = {
    "class token": _parameter(r"cls_token|class_embedding|^summary$"),
    "distillation token": _parameter("dist_token|distillation_token"),
    "registers": _parameter("reg_token|register_tokens"),
    "no class token": lambda model: not FEATURES["class token"](model),
    "rotary positions": _module("Rotary|Rope"),
    "relative position bias": _parameter("rel_pos|relative_position"),
    "LayerScale": _parameter(r"\.(ls_?\d|gamma_\d|lambda_\d|layer_scale\d|scales)"),
    "q/k norm": _parameter(r"att(n|ention)\.[qk]_norm"),
    "norm inside attention": _parameter(r"attn\.norm\."),
    "gated attention": _parameter(r"attn\.gate\."),
    "talking heads": _parameter(r"attn\.proj_l"),
    "keys shared by heads": lambda model: any(getattr(part, "num_kv_groups", 1) > 1 for part in model.modules()),
    "norms behind the branches": _module("ResPost|PostNorm"),
    "RMSNorm": _module("RmsNorm"),
    "norm before the blocks": _parameter("norm_pre|pre_layrnorm|ln_pre"),
    "gated MLP": _module("SwiGLU|GluMlp|GatedMLP"),
    "norm inside the MLP": _parameter(r"mlp\.norm"),
    "convolutional stem": _several_convolutions,
    "tokens-to-token stem": _module("TokensToToken"),
    "any image size": _setting("dynamic_img_size", True),
    "patches left out": lambda model: hasattr(getattr(model, "config", None), "mask_ratio"),
    "mean pooling": lambda model: _setting("global_pool", "avg")(model) or _setting("use_mean_pooling", True)(model),
    "attention pooling": _module("AttentionPool|MultiheadAttentionPoolingHead"),
    "class attention": _module("ClassAttn"),
    "a second head on all tokens": _parameter("aux_head"),
    "sdpa": _setting("_attn_implementation", "sdpa"),
    "eager": _setting("_attn_implementation", "eager"),
}


def features_of(model: nn.Module) -> list[str]:
    return [feature for feature, has in FEATURES.items() if has(model)]
