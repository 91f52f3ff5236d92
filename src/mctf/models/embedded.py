"""The embedded model: a compact Vision Transformer for 64 x 64 images whose weights come with the package.

A small convolutional stem gives one token per 4 x 4 pixels, 257 with the class token; twelve of timm's blocks follow.
Demonstrations and tutorials use it without a download.

Axes: B images, H W pixels, N tokens, C channels.
"""

from pathlib import Path
from typing import Any

import torch.nn.functional as F
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from ._common import Stem, build, pretrained_config, stem_layer
from .class_names import TINY_IMAGENET_CLASSES, class_names

WEIGHTS = Path(__file__).parent / "weights" / "embedded.safetensors"
_PATCH = 4
_SIDE = 64


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


default_cfgs = generate_default_cfgs(
    {
        "embedded": pretrained_config(
            num_classes=TINY_IMAGENET_CLASSES,
            label_names=tuple(class_names()),
            label_descriptions=dict(class_names()),
            input_size=(3, _SIDE, _SIDE),
            crop_pct=1.0,
            first_conv="patch_embed.conv1",
            file=str(WEIGHTS),
        )
    }
)


@register_model
def embedded(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """2.0 M parameters, 0.7 GFLOPs at 64 x 64 pixels, 200 classes of Tiny-ImageNet."""
    sizes: dict[str, Any] = {
        "img_size": _SIDE,
        "patch_size": _PATCH,
        "embed_dim": 128,
        "depth": 12,
        "num_heads": 4,
        "mlp_ratio": 2.5,
        "embed_layer": stem_layer(SmallStem, stem_dim=64),
        "pretrained_filter_fn": checkpoint_filter_fn,  # resamples positions for another img_size
    }
    return build(VisionTransformer, "embedded", pretrained, **{**sizes, **options})
