"""LV-ViT (Jiang et al., 2021), under the key names of its public checkpoints.

A convolutional stem, timm's blocks with every residual branch divided by two, and a second classifier that reads all
tokens but the class token. Its original training adds token labels and MixToken; fine-tuning here needs neither.

Axes: B images, N tokens, C channels.
"""

from typing import Any

import torch.nn.functional as F
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from ..errors import MctfError
from ._common import COMMON, ConstantScale, Stem, block_layer, build, pretrained_config, stem_layer

AUX_WEIGHT = 0.5  # of the strongest token's logits beside the class token's


class ConvolutionStem(Stem):
    """B 3 H W images -> B N C tokens: three convolutions at half the resolution, then patches of 8 x 8 of it."""

    def __init__(self, img_size: int | tuple[int, int], *, in_chans: int, embed_dim: int, stem_dim: int) -> None:
        super().__init__(img_size)
        self.conv1 = nn.Conv2d(in_chans, stem_dim, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(stem_dim)
        self.conv2 = nn.Conv2d(stem_dim, stem_dim, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(stem_dim)
        self.conv3 = nn.Conv2d(stem_dim, stem_dim, kernel_size=3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(stem_dim)
        self.proj = nn.Conv2d(stem_dim, embed_dim, kernel_size=8, stride=8)

    def forward(self, images: Tensor) -> Tensor:
        self.check(images)
        x = F.relu(self.bn1(self.conv1(images)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.relu(self.bn3(self.conv3(x)))
        return self.proj(x).flatten(2).transpose(1, 2)


class LVViT(VisionTransformer):
    """timm's VisionTransformer with the LV-ViT stem, residual branches divided by `skip_lam`, and `aux_head`.

    logits = head(class token) + 0.5 * max over the other tokens of aux_head(token)

    In training too: the sum is differentiable and trains both heads. Equal tokens give equal logits, so the maximum
    over fused tokens is the maximum over the tokens they stand for. stem_dim: channels of the stem's convolutions.
    options: timm's, as img_size or drop_path_rate.
    """

    def __init__(
        self,
        *,
        num_classes: int = 1000,
        global_pool: str = "token",
        mlp_ratio: float = 3.0,
        skip_lam: float = 2.0,
        stem_dim: int = 64,
        **options: Any,
    ) -> None:
        _check_pool(num_classes, global_pool)

        def divide_branches(block: Block) -> None:
            block.ls1 = ConstantScale(1 / skip_lam)  # timm's attribute for the scale of a branch
            block.ls2 = ConstantScale(1 / skip_lam)

        super().__init__(
            num_classes=num_classes,
            global_pool=global_pool,
            mlp_ratio=mlp_ratio,
            embed_layer=stem_layer(ConvolutionStem, stem_dim=stem_dim),
            block_fn=block_layer(divide_branches),
            **COMMON,
            **options,
        )
        self._reset_aux_head()

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        """Both heads: the class token's and the one of all other tokens."""
        return self.head, self.aux_head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Two heads for another number of classes; 0 removes both."""
        _check_pool(num_classes, self.global_pool if global_pool is None else global_pool)
        super().reset_classifier(num_classes, global_pool)
        self._reset_aux_head()

    def _reset_aux_head(self) -> None:
        like = {"device": self.cls_token.device, "dtype": self.cls_token.dtype}
        classes = self.num_classes
        self.aux_head = nn.Linear(self.embed_dim, classes, **like) if classes > 0 else nn.Identity()
        self.aux_head.train(self.training)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """B N C tokens after the norm -> B classes; the pooled features with `pre_logits` or without classes."""
        pooled = super().forward_head(x, pre_logits=True)
        if pre_logits or self.num_classes == 0:
            return pooled
        strongest = self.aux_head(x[:, self.num_prefix_tokens :]).amax(dim=1)
        return self.head(pooled) + AUX_WEIGHT * strongest


def _check_pool(num_classes: int, global_pool: str) -> None:
    if num_classes > 0 and global_pool != "token":
        raise MctfError(
            f"global_pool={global_pool!r} does not fit LV-ViT's two heads: use 'token', or num_classes=0 for features "
            "without heads"
        )


_CONFIG = pretrained_config(first_conv="patch_embed.conv1", classifier=("head", "aux_head"))
default_cfgs = generate_default_cfgs({"lvvit_t": _CONFIG, "lvvit_s": _CONFIG, "lvvit_m": _CONFIG})


@register_model
def lvvit_t(pretrained: bool = False, **options: Any) -> LVViT:
    """LV-ViT-T: 8.5 M parameters. Stem, MLP ratio and division of branches are taken from LV-ViT-S."""
    sizes = {"embed_dim": 240, "depth": 12, "num_heads": 4}
    return build(LVViT, "lvvit_t", pretrained, **{**sizes, **options})


@register_model
def lvvit_s(pretrained: bool = False, **options: Any) -> LVViT:
    """LV-ViT-S: 26.2 M parameters, 6.6 GFLOPs."""
    sizes = {"embed_dim": 384, "depth": 16, "num_heads": 6}
    return build(LVViT, "lvvit_s", pretrained, **{**sizes, **options})


@register_model
def lvvit_m(pretrained: bool = False, **options: Any) -> LVViT:
    """LV-ViT-M: 56 M parameters. Stem, MLP ratio and division of branches are taken from LV-ViT-S."""
    sizes = {"embed_dim": 512, "depth": 20, "num_heads": 8}
    return build(LVViT, "lvvit_m", pretrained, **{**sizes, **options})
