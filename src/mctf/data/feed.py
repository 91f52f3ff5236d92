"""What training asks of its data: batches that depend on nothing but seed, epoch, step and process.

Axes: B images, 3 H W.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from ..errors import MctfError, did_you_mean

Augmentation = Literal["none", "weak", "strong"]
InMemory = Literal["auto", "yes", "no"]
OnCorrupt = Literal["skip", "stop"]

_SMALLEST_CROP = {"weak": 0.6, "strong": 0.08}
_WORDS = {
    "augmentation": ("none", "weak", "strong"),
    "in_memory": ("auto", "yes", "no"),
    "on_corrupt": ("skip", "stop"),
}


class Feed(Protocol):
    """Training images for one process.

    classes: how many there are. known: index of each by name. images: in all processes together. note: how they are
    fed, in words for people. skipped: unreadable images met so far, each counted once; a neighbour stands in for each.
    """

    classes: int
    known: dict[str, int]
    images: int
    note: str

    @property
    def skipped(self) -> int: ...

    def steps(self) -> int:
        """Batches an epoch of this process; all processes have the same number, all batches the same size."""
        ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Augmented, normalised images (B 3 H W, float32, on the device) and labels (B, int64), from `start` on.

        The same call gives the same numbers at any time: a run that stopped after k steps goes on with start = k.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """How images become batches.

    batch: images a step of one process. image_size: height and width. mean, std: of pixels from 0 to 1.
    seed: the same in all processes.
    augmentation: "none" resizes and crops the middle; "weak" is a random crop of at least 0.6 of the area, and
    flips; "strong" is a crop of at least 0.08, flips, RandAugment (m9, mstd 0.5, increasing) and random erasing (0.25).
    smallest_crop: another share of the area than these.
    colour_jitter: most change of brightness, contrast and saturation, on top of "weak" or "strong".
    repeated: how often an epoch shows an image, each time augmented anew; of so many fewer images, so that epochs keep
    their length.
    workers: processes that read images where they are not kept in memory; 0 reads between the steps.
    in_memory: "yes" decodes all images once and augments batches on the device; "auto" does so where that pays.
    on_corrupt: "skip" puts the next readable image in the place of one that is not; "stop" raises MctfError.
    """

    batch: int
    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    seed: int = 0
    augmentation: Augmentation = "weak"
    smallest_crop: float | None = None
    colour_jitter: float = 0.0
    repeated: int = 1
    workers: int = 0
    in_memory: InMemory = "auto"
    on_corrupt: OnCorrupt = "skip"

    def __post_init__(self) -> None:
        for name, known in _WORDS.items():
            given = getattr(self, name)
            if given not in known:
                raise MctfError(f"{name} is {given!r}: {did_you_mean(str(given), known)}")
        for name, least in (("batch", 1), ("repeated", 1), ("workers", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise MctfError(f"{name} is {getattr(self, name)}: give {least} or more")
        if self.smallest_crop is not None and not 0 < self.smallest_crop <= 1:
            raise MctfError(f"smallest_crop is {self.smallest_crop}: give a share of the area, above 0 and at most 1")
        if self.smallest_crop is not None and self.augmentation == "none":
            raise MctfError("smallest_crop speaks of random crops, but there are none: choose another augmentation")
        if not 0 <= self.colour_jitter < 1:
            raise MctfError(f"colour_jitter is {self.colour_jitter}: give 0 or more, below 1")
        if len(self.image_size) != 2 or min(self.image_size) < 1:
            raise MctfError(f"image_size is {self.image_size}: give height and width")
        if len(self.mean) != 3 or len(self.std) != 3:
            raise MctfError("mean and std need three numbers each, one a colour: training reads images in RGB")

    @property
    def crop_scale(self) -> tuple[float, float]:
        """Least and most share of the area that a random crop keeps, where the augmentation has one."""
        return self.smallest_crop or _SMALLEST_CROP[self.augmentation], 1.0
