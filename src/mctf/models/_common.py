"""Parts shared by the models of this package. Their blocks, heads and feature maps are timm's VisionTransformer's.

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

PATCH = 16  # pixels per token, in each direction

# Arguments of timm's VisionTransformer for T2T-ViT and LV-ViT. The norm comes before every kind of pooling, so that the
# keys of a state_dict never change.
COMMON: dict[str, Any] = {
    "patch_size": PATCH,
    "qkv_bias": False,
    "fc_norm": False,
    "norm_layer": partial(LayerNorm, eps=1e-5),
}


class ConstantScale(nn.Module):
    """Multiplies by a constant of the architecture, which is not a weight."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor:.6g}"


class Stem(nn.Module):
    """A stem with one token per square of pixels, and the attributes that timm's VisionTransformer reads."""

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
                f"patch_size={patch_size} cannot be set: this stem has one token per {patch}x{patch} pixels"
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
        """Pixels per token, in each direction."""
        return self.patch_size[0] if as_scalar else self.patch_size

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return img_size[0] // self.patch_size[0], img_size[1] // self.patch_size[1]

    def check(self, images: Tensor) -> None:
        """Refuse images of another size than that of the positions."""
        size = tuple(images.shape[-2:])
        if size != self.img_size:
            raise MctfError(
                f"the model expects {self.img_size[0]}x{self.img_size[1]} images, got {size[0]}x{size[1]}: "
                f"create it with img_size={size}, or call its set_input_size(img_size={size})"
            )


def stem_layer(stem: Callable[..., Stem], **sizes: int) -> Callable[..., Stem]:
    """The constructor that timm's VisionTransformer calls for its stem; timm's other arguments are ignored."""

    def make(*, img_size: int | tuple[int, int], in_chans: int, embed_dim: int, **_: Any) -> Stem:
        return stem(img_size, in_chans=in_chans, embed_dim=embed_dim, **sizes)

    return make


def block_layer(change: Callable[[Block], None]) -> Callable[..., Block]:
    """timm's own pre-norm block with one change; its class stays timm's, so hosts accept it."""

    def make(**options: Any) -> Block:
        block = Block(**options)
        change(block)
        return block

    return make


def pretrained_config(**entries: Any) -> dict[str, Any]:
    """timm's record of a model: image size, preprocessing, classifier."""
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
    """A model by timm's builder, which handles pretrained weights, `features_only` and more."""
    features = {"out_indices": 3, "feature_cls": "getter"}
    return build_model_with_cfg(model, name, pretrained, feature_cfg=features, **options)
