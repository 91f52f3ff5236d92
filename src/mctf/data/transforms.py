"""Transforms of single images: the preprocessing that a model was trained with, and timm's augmentation.

Axes: images are 3 H W afterwards, float32, normalized.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.data.auto_augment import RandAugment
from timm.data.transforms import ResizeKeepRatio, str_to_interp_mode
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor, nn

from .feed_options import FeedOptions

Transform = Callable[[Image.Image], Tensor]

RANDAUGMENT = "rand-m9-mstd0.5-inc1"
ERASE_PROBABILITY = 0.25


@dataclass(frozen=True)
class Preprocessing:
    """Resize so that the crop takes `crop_pct` of the shorter side, center-crop, normalize.

    image_size: height and width of the crop.
    """

    image_size: tuple[int, int]
    crop_pct: float
    crop_mode: str
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, model: nn.Module, *, crop_pct: float | None = None) -> "Preprocessing":
        """The preprocessing in the model's timm config, for the image size that the model was built for."""
        config = resolve_model_data_config(model)
        image_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
        height, width = image_size or config["input_size"][1:]
        return cls(
            image_size=(height, width),
            crop_pct=crop_pct or config["crop_pct"],
            crop_mode=config["crop_mode"],
            interpolation=config["interpolation"],
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
        )

    def transform(self, *, normalize: bool = True) -> Transform:
        """From a PIL image to the model's input. An image of the right size is not resampled.

        normalize: False for the cropped image as uint8, a quarter of the bytes; the device normalizes it.
        """
        transform: Any = create_transform(
            input_size=(3, *self.image_size),
            crop_pct=self.crop_pct,
            crop_mode=self.crop_mode,
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
            normalize=normalize,
        )
        for step in transform.transforms:
            if isinstance(step, ResizeKeepRatio):  # for non-square crops timm adds it, always bilinear
                step.interpolation = str_to_interp_mode(self.interpolation)
        return transform


def training_transform(options: FeedOptions) -> Transform:
    """From a PIL image to the model's input, augmented; draws from the global generators of Python, numpy and torch.

    Augmentation "none" is the preprocessing of evaluation with crop_pct 1.
    """
    if options.augmentation == "none":
        return Preprocessing(
            image_size=options.image_size,
            crop_pct=1.0,
            crop_mode="center",
            interpolation=options.interpolation,
            mean=options.mean,
            std=options.std,
        ).transform()
    strong = options.augmentation == "strong"
    transform: Any = transforms_imagenet_train(
        options.image_size,
        scale=options.crop_scale,
        auto_augment=RANDAUGMENT if strong else None,
        color_jitter=options.color_jitter or None,
        force_color_jitter=True,  # else RandAugment disables it; `create_transform` lacks this argument
        re_prob=ERASE_PROBABILITY if strong else 0.0,
        re_mode="pixel",
        interpolation=options.interpolation,
        mean=options.mean,
        std=options.std,
    )
    for step in transform.transforms:
        if isinstance(step, RandAugment):
            for operation in step.ops:
                if operation.name == "PosterizeIncreasing":
                    operation.level_fn = partial(_at_least_one_bit, operation.level_fn)
    return transform


def _at_least_one_bit(to_bits: Callable[..., tuple[int]], level: float, settings: dict[str, Any]) -> tuple[int]:
    """timm's posterize keeps no bit at the highest magnitude, which Pillow 13 refuses."""
    return (max(1, *to_bits(level, settings)),)
