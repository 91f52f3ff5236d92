"""Two models whose weights come with the package, both with the 200 classes of Tiny-ImageNet.

`embedded` is DeiT-Tiny at 224 x 224 pixels. The matrices of its blocks are packed as int8, with a scale per row.
`embedded_small` takes 64 x 64 pixels: a small convolutional stem gives one token per 4 x 4 pixels, 257 with the class
token, and twelve narrow blocks follow.

Axes: B images, H W pixels, N tokens, C channels.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from ._common import Stem, build, pretrained_config, stem_layer
from .class_names import TINY_IMAGENET_CLASSES, class_names

FOLDER = Path(__file__).parent / "weights"
WEIGHTS = FOLDER / "embedded.safetensors"
SMALL_WEIGHTS = FOLDER / "embedded_small.safetensors"
_SCALE = "_scale"  # appended to the name of a matrix
_PATCH = 4
_SIDE = 64


def pack_int8(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict with the matrices of the blocks as int8, a scale per row under `NAME_scale`; the rest is float16.

    Patch embedding and classifier, where rounding shows most, are a thirtieth of the file.
    """
    packed: dict[str, Tensor] = {}
    for name, value in state.items():
        packed[name] = value.half() if value.is_floating_point() else value
        if name.startswith("blocks.") and value.dim() == 2:
            scale = (value.float().abs().amax(dim=1).clamp_min(1e-8) / 127).half()
            packed[name] = (value.float() / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
            packed[name + _SCALE] = scale
    return packed


def unpack_int8(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float32 state_dict of a packed one; others are returned as they are."""
    unpacked: dict[str, Tensor] = {}
    for name, value in state.items():
        if name + _SCALE in state:
            unpacked[name] = value.float() * state[name + _SCALE].float()[:, None]
        elif not (name.endswith(_SCALE) and name.removesuffix(_SCALE) in state):
            unpacked[name] = value
    return unpacked


def _unpack_and_resample(state: dict[str, Tensor], model: VisionTransformer) -> dict[str, Tensor]:
    """timm's own filter, which resamples positions for another img_size, after unpacking."""
    return checkpoint_filter_fn(unpack_int8(state), model)


class SmallStem(Stem):
    """B 3 H W images -> B N C tokens: three convolutions at half the resolution, then one that halves it again."""

    def __init__(self, img_size: int | tuple[int, int], *, in_chans: int, embed_dim: int, stem_dim: int) -> None:
        super().__init__(img_size, patch=_PATCH)
        self.conv1 = nn.Conv2d(in_chans, stem_dim // 2, kernel_size=3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(stem_dim // 2)
        self.conv2 = nn.Conv2d(stem_dim // 2, stem_dim, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(stem_dim)
        self.conv3 = nn.Conv2d(stem_dim, stem_dim, kernel_size=3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(stem_dim)
        self.proj = nn.Conv2d(stem_dim, embed_dim, kernel_size=3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        self.check(images)
        x = F.relu(self.bn1(self.conv1(images)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.relu(self.bn3(self.conv3(x)))
        return self.proj(x).flatten(2).transpose(1, 2)


_TINY_IMAGENET: dict[str, Any] = {
    "num_classes": TINY_IMAGENET_CLASSES,
    "label_names": tuple(class_names()),
    "label_descriptions": dict(class_names()),
}
default_cfgs = generate_default_cfgs(
    {
        "embedded": pretrained_config(**_TINY_IMAGENET, first_conv="patch_embed.proj", file=str(WEIGHTS)),
        "embedded_small": pretrained_config(
            **_TINY_IMAGENET,
            input_size=(3, _SIDE, _SIDE),
            crop_pct=1.0,
            first_conv="patch_embed.conv1",
            file=str(SMALL_WEIGHTS),
        ),
    }
)


@register_model
def embedded(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """DeiT-Tiny: 5.6 M parameters, 1.26 GFLOPs at 224 x 224 pixels, 200 classes of Tiny-ImageNet."""
    sizes: dict[str, Any] = {
        "patch_size": 16,
        "embed_dim": 192,
        "depth": 12,
        "num_heads": 3,
        "pretrained_filter_fn": _unpack_and_resample,
    }
    return build(VisionTransformer, "embedded", pretrained, **{**sizes, **options})


@register_model
def embedded_small(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """2.0 M parameters, 0.7 GFLOPs at 64 x 64 pixels, 200 classes of Tiny-ImageNet."""
    sizes: dict[str, Any] = {
        "img_size": _SIDE,
        "patch_size": _PATCH,
        "embed_dim": 128,
        "depth": 12,
        "num_heads": 4,
        "mlp_ratio": 2.5,
        "embed_layer": stem_layer(SmallStem, stem_dim=64),
        "pretrained_filter_fn": checkpoint_filter_fn,
    }
    return build(VisionTransformer, "embedded_small", pretrained, **{**sizes, **options})
