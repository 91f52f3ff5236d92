"""Training batches that depend on seed, epoch, step and rank alone: from memory where images fit, else by a loader.

Axes: B images, 3 H W.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .._utils import plural
from ..errors import MctfError
from .dataset import ImageDataset, Source, open_dataset
from .feed_options import FeedOptions
from .gpu_augment import KERNELS
from .gpu_feed import GpuFeed, Progress, UnequalSizesError, decode_images
from .loader_feed import LoaderFeed
from .resources import memory_of
from .sampler import ResumableSampler

_MEMORY_FRACTION = 0.25  # of the device, for decoded images
_SMALL = 96 * 96  # pixels up to which a CPU, too, spends more time on decoding than on augmentation
_PROBED = 32  # images whose sizes are compared before all are decoded


class Feed(Protocol):
    """Training images for one rank.

    class_to_idx: index of each class by name. num_images: on all ranks together.
    digest: of the images and labels, see `ImageDataset.digest`. note: how images are fed, for logs.
    skipped: number of unreadable images so far; the next readable image replaces each.
    """

    num_classes: int
    class_to_idx: dict[str, int]
    num_images: int
    digest: str
    note: str

    @property
    def skipped(self) -> int: ...

    def steps(self) -> int:
        """Batches per epoch; the same number on every rank, all of the same size."""
        ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Augmented, normalized images (B 3 H W, float32, on the device) and labels (B, int64), from step `start` on.

        The same arguments give the same batches: a run that stopped after k steps continues with start = k.
        """
        ...


def make_feed(
    data: Source,
    *,
    options: FeedOptions,
    device: torch.device | str,
    rank: int = 0,
    world_size: int = 1,
    classes: Path | None = None,
    progress: Progress | None = None,
) -> Feed:
    """Batches of labeled images for one rank.

    data, classes: see `open_dataset`. progress: called with the images decoded into memory so far, and their number.
    """
    dataset = open_dataset(data, classes=classes, limits=options.limits).check_trainable()
    sampler = ResumableSampler(
        len(dataset), options.batch, seed=options.seed, repeats=options.repeated, rank=rank, world_size=world_size
    )
    device = torch.device(device)
    size, obstacle = None, "in_memory = no"
    if options.in_memory != "no":
        size, obstacle = _in_memory_size(dataset, options, device)
    if size is not None:
        try:
            decoded = decode_images(
                dataset,
                size=size,
                device=device,
                workers=options.workers,
                skip=options.on_corrupt == "skip",
                progress=progress,
            )
        except UnequalSizesError as error:
            obstacle = str(error)
        else:
            note = f"{plural(len(dataset), 'image')} of {size[1]} x {size[0]} pixels, kept on {device}"
            gigabytes = decoded.pixels.nbytes / 1e9
            return GpuFeed(dataset, decoded, sampler=sampler, options=options, note=f"{note} ({gigabytes:.2f} GB)")
    if options.in_memory == "yes":
        raise MctfError(f"the images cannot be kept in memory: {obstacle}; use a loader (in_memory = no)")
    feed = LoaderFeed(dataset, sampler=sampler, options=options, device=device)
    readers = plural(feed.workers, "worker") if feed.workers else "the training process"
    feed.note = f"{plural(len(dataset), 'image')}, read by {readers} ({obstacle})"
    return feed


def _in_memory_size(
    dataset: ImageDataset, options: FeedOptions, device: torch.device
) -> tuple[tuple[int, int] | None, str]:
    """Height and width of images to keep in memory; or None, and why not."""
    if options.interpolation not in KERNELS:
        return None, f"batches have no {options.interpolation!r} interpolation, only {', '.join(KERNELS)}"
    count = min(len(dataset), _PROBED)
    sizes = set()
    for number in range(count):
        image, *_ = dataset.read_or_next(number * len(dataset) // count, skip=options.on_corrupt == "skip")
        sizes.add((image.height, image.width))
    if len(sizes) > 1:
        (height, width), (other_height, other_width) = sorted(sizes)[:2]
        return None, f"they have several sizes ({width} x {height} and {other_width} x {other_height})"
    height, width = sizes.pop()
    needed, limit = 3 * height * width * len(dataset), int(memory_of(device) * _MEMORY_FRACTION)
    if needed > limit:
        return None, f"they take {needed / 1e9:.1f} GB decoded, and the limit on {device} is {limit / 1e9:.1f} GB"
    if options.in_memory == "auto" and device.type == "cpu" and height * width > _SMALL:
        return None, "they are not small, and there is no GPU"
    return (height, width), ""
