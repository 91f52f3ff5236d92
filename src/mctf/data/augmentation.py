"""One image at a time augmented, by timm's transforms.

Axes: images are 3 H W after it, float32, normalised.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from .feed import FeedOptions
from .preprocessing import Preprocessing, Transform

RANDAUGMENT = "rand-m9-mstd0.5-inc1"
ERASING = 0.25  # chance that an image loses a rectangle


def make_transform(options: FeedOptions) -> Transform:
    """From a PIL image to an input of the model; draws from the global generators of Python, numpy and torch."""
    if options.augmentation == "none":
        return plain(options).transform()
    from timm.data.auto_augment import RandAugment
    from timm.data.transforms_factory import transforms_imagenet_train

    strong = options.augmentation == "strong"
    made: Any = transforms_imagenet_train(
        options.image_size,
        scale=options.crop_scale,
        auto_augment=RANDAUGMENT if strong else None,
        color_jitter=options.colour_jitter or None,
        force_color_jitter=True,  # else RandAugment switches it off; `create_transform` has no such option
        re_prob=ERASING if strong else 0.0,
        re_mode="pixel",
        interpolation=options.interpolation,
        mean=options.mean,
        std=options.std,
    )
    for step in made.transforms:
        if isinstance(step, RandAugment):
            _keep_one_bit(step.ops)
    return made


def _keep_one_bit(operations: Iterable[Any]) -> None:
    """timm's posterizing keeps no bit at the highest magnitude, which Pillow 13 refuses."""
    for operation in operations:
        if operation.name == "PosterizeIncreasing":
            operation.level_fn = partial(_at_least_one, operation.level_fn)


def _at_least_one(to_bits: Callable[..., tuple[int]], level: float, settings: dict[str, Any]) -> tuple[int]:
    return (max(1, *to_bits(level, settings)),)


def plain(options: FeedOptions) -> Preprocessing:
    """What evaluation does, with the whole shorter side in the crop."""
    return Preprocessing(
        image_size=options.image_size,
        crop_pct=1.0,
        crop_mode="center",
        interpolation=options.interpolation,
        mean=options.mean,
        std=options.std,
    )
