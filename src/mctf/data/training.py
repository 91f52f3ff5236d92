"""Where training gets its batches: from folders, zip files or a hub, by way of memory or of a loader."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import MctfError
from ..wording import counted
from .decoding import Progress, UnequalSizesError, decode, processes_for
from .examples import Examples, find_examples
from .feed import Feed, FeedOptions
from .hub import PREFIX, hub_examples, load_hub
from .loading import LoaderFeed
from .memory import MemoryFeed
from .resampling import KERNELS
from .sampling import Order

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
    progress: Progress | None = None,
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
    readers = counted(options.workers, "worker") if options.workers else "the training process"
    note = f"{counted(len(examples), 'image')}, read by {readers} ({why_not})"
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
    examples: Examples, *, order: Order, options: FeedOptions, device: torch.device, progress: Progress | None
) -> MemoryFeed:
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
    note = f"{counted(len(examples), 'image')} of {width} x {height} pixels, kept on {device} ({needed / 1e9:.2f} GB)"
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
