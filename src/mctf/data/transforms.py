"""What a model wants done to an image before it sees it, as timm records it.

Axes: images are 3 H W after it, float32.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from PIL import Image
from torch import Tensor, nn

if TYPE_CHECKING:
    from .feed import FeedOptions

Transform = Callable[[Image.Image], Tensor]


@dataclass(frozen=True)
class Preprocessing:
    """Resize so that the crop takes `crop_pct` of the shorter side, crop the middle, normalise.

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
        """The model's own, for the image size it has; with another crop where one is given."""
        from timm.data import resolve_model_data_config

        config = resolve_model_data_config(model)
        made_for = getattr(getattr(model, "patch_embed", None), "img_size", None)
        height, width = made_for or config["input_size"][1:]
        return cls(
            image_size=(height, width),
            crop_pct=crop_pct or config["crop_pct"],
            crop_mode=config["crop_mode"],
            interpolation=config["interpolation"],
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
        )

    def transform(self) -> Transform:
        """From a PIL image to the model's input. An image that has the size already is not resampled."""
        from timm.data import create_transform
        from timm.data.transforms import ResizeKeepRatio, str_to_interp_mode

        made: Any = create_transform(
            input_size=(3, *self.image_size),
            crop_pct=self.crop_pct,
            crop_mode=self.crop_mode,
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
        )
        for step in made.transforms:
            if isinstance(step, ResizeKeepRatio):  # timm makes it for oblong crops, always bilinear
                step.interpolation = str_to_interp_mode(self.interpolation)
        return made


# MERGED from mctf.data.transforms:
# One image at a time augmented, by timm's transforms.
#
# Axes: images are 3 H W after it, float32, normalised.

RANDAUGMENT = "rand-m9-mstd0.5-inc1"
ERASING = 0.25  # chance that an image loses a rectangle


def make_transform(options: "FeedOptions") -> Transform:
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


def plain(options: "FeedOptions") -> Preprocessing:
    """What evaluation does, with the whole shorter side in the crop."""
    return Preprocessing(
        image_size=options.image_size,
        crop_pct=1.0,
        crop_mode="center",
        interpolation=options.interpolation,
        mean=options.mean,
        std=options.std,
    )
