"""What the models of this package share beside timm's VisionTransformer, whose blocks, heads and feature maps they use.

Axes: B images, H W pixels, N tokens, C channels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import LayerNorm
from timm.models import build_model_with_cfg
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from ..errors import MctfError

PATCH = 16  # pixels a token stands for, in each direction

# Arguments of timm's VisionTransformer that hold for T2T-ViT and LV-ViT. The norm stays before the pooling whatever the
# pooling is, so that the keys of a state_dict never change.
COMMON: dict[str, Any] = {
    "patch_size": PATCH,
    "qkv_bias": False,
    "fc_norm": False,
    "norm_layer": partial(LayerNorm, eps=1e-5),
}


class ConstantScale(nn.Module):
    """Multiplies by a number that is part of the architecture, not of the weights."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor:.6g}"


class Stem(nn.Module):
    """A stem that gives one token for each square of pixels, with what timm's VisionTransformer asks of one."""

    def __init__(self, img_size: int | tuple[int, int], *, patch: int = PATCH) -> None:
        super().__init__()
        self.patch_size = (patch, patch)
        self.set_input_size(img_size)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Take images of another height and width; the weights do not depend on it."""
        patch = self.patch_size[0]
        if patch_size not in (None, patch, self.patch_size):
            raise MctfError(
                f"patch_size={patch_size} cannot be set: this stem always gives a token for {patch}x{patch} pixels"
            )
        if img_size is None:
            return
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        if height <= 0 or width <= 0 or height % patch or width % patch:
            raise MctfError(f"images of {height}x{width} do not divide into tokens: give multiples of {patch} pixels")
        self.img_size = (height, width)
        self.grid_size = self.dynamic_feat_size(self.img_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        """Pixels a token stands for."""
        return self.patch_size[0] if as_scalar else self.patch_size

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return img_size[0] // self.patch_size[0], img_size[1] // self.patch_size[1]

    def check(self, images: Tensor) -> None:
        """Refuse images of a size that the positions were not made for."""
        came = tuple(images.shape[-2:])
        if came != self.img_size:
            raise MctfError(
                f"the model was made for {self.img_size[0]}x{self.img_size[1]} images, got {came[0]}x{came[1]}: "
                f"create it with img_size={came}, or call its set_input_size(img_size={came})"
            )


def stem_layer(stem: Callable[..., Stem], **sizes: int) -> Callable[..., Stem]:
    """The constructor that timm's VisionTransformer calls for its stem; what timm adds has no meaning for ours."""

    def make(*, img_size: int | tuple[int, int], in_chans: int, embed_dim: int, **_: Any) -> Stem:
        return stem(img_size, in_chans=in_chans, embed_dim=embed_dim, **sizes)

    return make


def block_layer(change: Callable[[Block], None]) -> Callable[..., Block]:
    """timm's own pre-norm block with one thing changed: whatever knows timm's block knows this one."""

    def make(**options: Any) -> Block:
        block = Block(**options)
        change(block)
        return block

    return make


def pretrained_config(**entries: Any) -> dict[str, Any]:
    """What timm records about a model: its images and how they are prepared, its classifier."""
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "fixed_input_size": True,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "classifier": "head",
        **entries,
    }


def build(model: type[VisionTransformer], name: str, pretrained: bool, **options: Any) -> VisionTransformer:
    """A model through timm's builder, which knows of pretrained weights, `features_only` and more."""
    features = {"out_indices": 3, "feature_cls": "getter"}
    return build_model_with_cfg(model, name, pretrained, feature_cfg=features, **options)
