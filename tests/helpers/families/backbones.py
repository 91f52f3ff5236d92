"""Tiny T2T-ViTs and LV-ViTs, which this package has itself: timm's VisionTransformer with other stems and scales."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from torch import nn

from helpers.families.base import CLASSES
from helpers.families.timm_vit import SIZES, TimmViT
from mctf.models.lv_vit import LVViT
from mctf.models.t2t_vit import T2TViT

_SIZES = {name: value for name, value in SIZES.items() if name not in ("img_size", "patch_size")}


def _build(kind: Callable[..., nn.Module], **features: Any) -> nn.Module:
    model = kind(**{**_SIZES, "img_size": 128, "num_classes": CLASSES, **features})
    model.requires_grad_(True)  # T2T-ViT's positions too
    return model


class Backbones(TimmViT):
    title = "mctf `T2TViT`, `LVViT`"
    models = "T2T-ViT, LV-ViT"
    classes = ("T2TViT", "LVViT")
    builders: ClassVar[Mapping[str, Callable[..., nn.Module]]] = {
        "t2t_vit": partial(_build, T2TViT, token_dim=16),
        "lvvit": partial(_build, LVViT, stem_dim=16),
    }
    chosen = ("t2t_vit", "lvvit")
