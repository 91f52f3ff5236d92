"""How training images become batches: the options of a feed, with the values each of them takes."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import MctfError, did_you_mean
from .decode import DEFAULT_LIMITS, ReadLimits

Augmentation = Literal["none", "weak", "strong"]
InMemory = Literal["auto", "yes", "no"]
OnCorrupt = Literal["skip", "stop"]


@dataclass(frozen=True)
class Limits:
    """The numbers that an option takes, from `low` to `high`; above, below: without `low`, `high` itself."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False
    integer: bool = False

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.integer else (int, float)):
            return False
        if (self.above and value == self.low) or (self.below and value == self.high):
            return False
        return self.low <= value <= self.high

    def __str__(self) -> str:
        kind = "an integer" if self.integer else "a number"
        low = f"above {self.low:g}" if self.above else f"{self.low:g} or more"
        high = f", below {self.high:g}" if self.below else f", at most {self.high:g}"
        return f"{kind}, {low}" + (high if self.high < math.inf else "")


# One entry per option that a training config repeats; the config accepts the same values.
FEED_LIMITS: dict[str, Limits] = {
    "batch": Limits(1, integer=True),
    "repeated": Limits(1, integer=True),
    "workers": Limits(0, integer=True),
    "seed": Limits(0, integer=True),
    "smallest_crop": Limits(0, 1, above=True),
    # at 1 a factor can be 0, which makes an image black; above, factors are negative and torchvision cuts them off
    "color_jitter": Limits(0, 1, below=True),
}
FEED_CHOICES: dict[str, tuple[str, ...]] = {
    "augmentation": ("none", "weak", "strong"),
    "in_memory": ("auto", "yes", "no"),
    "on_corrupt": ("skip", "stop"),
}
_SMALLEST_CROP = {"weak": 0.6, "strong": 0.08}


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """How images become batches.

    batch: images per step of one rank. image_size: height and width. mean, std: of pixels in [0, 1].
    seed: the same on every rank.
    augmentation: "none" resizes and center-crops; "weak" is a random resized crop of at least 0.6 of the area and a
    horizontal flip; "strong" is a crop of at least 0.08, a flip, RandAugment (m9, mstd 0.5, increasing) and random
    erasing (0.25).
    smallest_crop: least fraction of the area that a random crop keeps, in place of these.
    color_jitter: largest relative change of brightness, contrast and saturation, on top of "weak" or "strong".
    repeated: repeated augmentation. An epoch shows each of its images that many times, and so many fewer images.
    workers: loader processes; None for the default of `num_workers`, 0 to read in the training process.
    in_memory: "yes" decodes all images once and augments batches on the device; "auto" does so where that is faster.
    on_corrupt: "skip" replaces an unreadable image by the next readable one; "stop" raises MctfError.
    limits: images beyond them are unreadable.
    """

    batch: int
    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    seed: int = 0
    augmentation: Augmentation = "weak"
    smallest_crop: float | None = None
    color_jitter: float = 0.0
    repeated: int = 1
    workers: int | None = None
    in_memory: InMemory = "auto"
    on_corrupt: OnCorrupt = "skip"
    limits: ReadLimits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        for name in (*FEED_LIMITS, *FEED_CHOICES):
            value = getattr(self, name)
            if value is None and name in ("smallest_crop", "workers"):
                continue
            try:
                check_feed_option(name, value)
            except MctfError as error:
                raise MctfError(f"{name} is {value!r}: {error}") from None
        if self.smallest_crop is not None and self.augmentation == "none":
            raise MctfError("smallest_crop is for random crops, which augmentation = none has not: choose another one")
        if len(self.image_size) != 2 or min(self.image_size) < 1:
            raise MctfError(f"image_size is {self.image_size}: give height and width")
        if len(self.mean) != 3 or len(self.std) != 3:
            raise MctfError("mean and std need three numbers each, one per channel: training reads images in RGB")

    @property
    def crop_scale(self) -> tuple[float, float]:
        """Least and largest fraction of the area that a random crop keeps; not defined for augmentation "none"."""
        return self.smallest_crop or _SMALLEST_CROP[self.augmentation], 1.0


def check_feed_option(name: str, value: Any) -> None:
    """Raises MctfError with the expected values, unless `value` is one of them for the option `name`."""
    if name in FEED_CHOICES:
        if value not in FEED_CHOICES[name]:
            raise MctfError(did_you_mean(str(value), FEED_CHOICES[name]))
    elif value not in FEED_LIMITS[name]:
        raise MctfError(f"expected {FEED_LIMITS[name]}")
