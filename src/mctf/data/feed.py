"""What training asks of its data: batches that depend on nothing but seed, epoch, step and process.

Axes: B images, 3 H W.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from .._utils import plural
from ..errors import MctfError, did_you_mean
from .dataset import PREFIX, Examples, find_examples, hub_examples, load_hub
from .sampler import Order

if TYPE_CHECKING:
    from .gpu_feed import MemoryFeed, Progress

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
    fed, in words for people. skipped: unreadable images met so far, each plural once; a neighbour stands in for each.
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


# MERGED from mctf.data.feed:
# Where training gets its batches: from folders, zip files or a hub, by way of memory or of a loader.

__all__ = ["Feed", "FeedOptions", "make_feed"]

Data = Path | str | Sequence[Path | str]

_MEMORY_SHARE = 0.25  # of what the device has in all: what is free differs from run to run, and a resumed run must not
_SMALL = 96 * 96  # pixels up to which a CPU, too, decodes longer than it augments
_PROBED = 32  # images looked at before all are decoded


def make_feed(
    data: Data,
    *,
    options: FeedOptions,
    device: torch.device | str,
    rank: int = 0,
    world: int = 1,
    classes: Path | None = None,
    progress: "Progress | None" = None,
) -> Feed:
    """Batches of labelled images for process `rank` of `world`.

    data: a folder of class folders, one or several zip files of the same (a list, or one word with commas), or
    "hf:NAME" or "hf:NAME:SPLIT". classes: a TSV file of index, class folder and name; without it, classes are
    numbered in the order of their folders' names. progress: called while images are decoded into memory.
    """
    examples = open_examples(data, classes=classes)
    order = Order(len(examples), options.batch, seed=options.seed, repeated=options.repeated, rank=rank, world=world)
    device = torch.device(device)
    why_not = "as asked" if options.in_memory == "no" else None
    if why_not is None:
        try:
            return _memory_feed(examples, order=order, options=options, device=device, progress=progress)
        except _NotInMemoryError as reason:
            why_not = str(reason)
    if options.in_memory == "yes":
        raise MctfError(f"the images cannot be kept in memory: {why_not}; let a loader read them (in_memory = no)")
    readers = plural(options.workers, "worker") if options.workers else "the training process"
    note = f"{plural(len(examples), 'image')}, read by {readers} ({why_not})"
    from .loader_feed import LoaderFeed

    return LoaderFeed(examples, order=order, options=options, device=device, note=note)


def open_examples(data: Data, *, classes: Path | None = None) -> Examples:
    """The labelled images that `make_feed` feeds."""
    if isinstance(data, str) and data.startswith(PREFIX):
        return hub_examples(load_hub(data), name=data.removeprefix(PREFIX), table=classes)
    return find_examples(_paths(data), table=classes)


def _paths(data: Data) -> list[Path]:
    if isinstance(data, Path):
        return [data]
    if isinstance(data, str):
        whole = Path(data)
        return [whole] if data and whole.exists() else [Path(part.strip()) for part in data.split(",") if part.strip()]
    return [path for part in data for path in _paths(part)]


class _NotInMemoryError(Exception):
    """Why images are not kept in memory, as a clause."""


def _memory_feed(
    examples: Examples, *, order: Order, options: FeedOptions, device: torch.device, progress: "Progress | None"
) -> "MemoryFeed":
    from .gpu_augment import KERNELS
    from .gpu_feed import MemoryFeed, UnequalSizesError, decode, processes_for

    if options.interpolation not in KERNELS:
        raise _NotInMemoryError(
            f"{options.interpolation!r} is no interpolation of batches, as {', '.join(KERNELS)} are"
        )
    skip = options.on_corrupt == "skip"
    height, width = size = _probe(examples, skip=skip)
    needed, room = 3 * height * width * len(examples), int(_memory_of(device) * _MEMORY_SHARE)
    if needed > room:
        raise _NotInMemoryError(
            f"they take {needed / 1e9:.1f} GB decoded, and {room / 1e9:.1f} GB of {device} are for them"
        )
    if options.in_memory == "auto" and device.type == "cpu" and height * width > _SMALL:
        raise _NotInMemoryError("they are not small, and there is no GPU")
    try:
        decoded = decode(
            examples,
            size=size,
            device=device,
            processes=max(options.workers, processes_for(order.world)),
            skip=skip,
            progress=progress,
        )
    except UnequalSizesError as error:
        raise _NotInMemoryError(str(error)) from None
    note = f"{plural(len(examples), 'image')} of {width} x {height} pixels, kept on {device} ({needed / 1e9:.2f} GB)"
    return MemoryFeed(examples, decoded, order=order, options=options, note=note)


def _probe(examples: Examples, *, skip: bool) -> tuple[int, int]:
    """Height and width of some images from all over, if these agree."""
    count = min(len(examples), _PROBED)
    sizes = set()
    for number in range(count):
        picture = examples.read(number * len(examples) // count, skip=skip)[0]
        sizes.add((picture.height, picture.width))
    if len(sizes) > 1:
        (height, width), (other_height, other_width) = sorted(sizes)[:2]
        raise _NotInMemoryError(f"they have several sizes ({width} x {height} and {other_width} x {other_height})")
    return sizes.pop()


def _memory_of(device: torch.device) -> int:
    """All of it, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
