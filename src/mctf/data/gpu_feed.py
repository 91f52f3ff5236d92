"""Training batches from memory: all images are decoded once into one tensor on the device, which augments batches.

Axes: N images in all, B per batch, 3 h w stored (uint8), 3 H W augmented.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import MctfError
from .dataset import ImageDataset, ReadFailure, SkippedImages, none_readable
from .feed_options import FeedOptions
from .gpu_augment import BatchAugmentation
from .loader import load_batches
from .resources import num_workers, to_device
from .sampler import ResumableSampler, generator_for

Progress = Callable[[int, int], None]  # images decoded so far, images in all

_CHUNK_BYTES = 2**20  # a few chunks per worker are in shared memory at a time, which is small in containers
_MIN_IMAGES_FOR_WORKERS = 2000  # fewer are decoded before workers have started


class UnequalSizesError(MctfError):
    """Images of several sizes, which do not fit into one tensor."""


@dataclass(frozen=True)
class DecodedImages:
    """pixels: N 3 h w, uint8. replacement: N, int64, the image itself or the next readable one."""

    pixels: Tensor
    replacement: Tensor
    skipped: SkippedImages


class GpuFeed:
    """A feed that reads no file once it is built; the device may be a CPU, too."""

    def __init__(
        self,
        dataset: ImageDataset,
        decoded: DecodedImages,
        *,
        sampler: ResumableSampler,
        options: FeedOptions,
        note: str = "",
    ) -> None:
        assert dataset.targets is not None
        self.num_classes, self.class_to_idx = dataset.num_classes, dataset.class_to_idx or {}
        self.num_images = len(dataset)
        self.digest = dataset.digest()
        self.note = note
        self._device = decoded.pixels.device
        self._decoded = decoded
        self._labels = dataset.targets.to(self._device)
        self._sampler = sampler
        self._augment = BatchAugmentation(options, self._device)

    @property
    def skipped(self) -> int:
        return len(self._decoded.skipped)

    def steps(self) -> int:
        return self._sampler.steps

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        sampler = self._sampler
        rows = to_device(self._decoded.replacement[sampler.entries(epoch)[0]], self._device)
        for step in range(start, sampler.steps):
            batch = rows[step * sampler.batch_size : (step + 1) * sampler.batch_size]
            generator = generator_for("batch", sampler.seed, epoch, step, sampler.rank)
            yield self._augment(self._decoded.pixels[batch], generator), self._labels[batch]


def decode_images(
    dataset: ImageDataset,
    *,
    size: tuple[int, int],
    device: torch.device,
    workers: int | None = None,
    skip: bool = True,
    progress: Progress | None = None,
) -> DecodedImages:
    """Every image, all of height and width `size`; raises UnequalSizesError for an image of another size.

    workers: None for the default of `num_workers`. skip: if False, an unreadable image raises MctfError.
    """
    per_chunk = max(1, _CHUNK_BYTES // (3 * size[0] * size[1]))
    indices = range(len(dataset))
    chunks = [[indices[start : start + per_chunk]] for start in range(0, len(dataset), per_chunk)]
    used = 0 if len(dataset) < _MIN_IMAGES_FOR_WORKERS else num_workers(len(chunks), requested=workers)
    pixels = torch.empty(len(dataset), 3, *size, dtype=torch.uint8, device=device)
    failures: list[ReadFailure] = []
    done = 0
    for (chunk,) in load_batches(_Decoder(dataset, size).load, chunks, list, workers=used):
        decoded, failed = chunk
        failures += failed
        if failures and not skip:
            dataset.read_or_next(failures[0].index, skip=False)  # raises the error with its cure
        pixels[done : done + len(decoded)] = decoded
        done += len(decoded)
        if progress is not None:
            progress(done, len(dataset))
    skipped = SkippedImages()
    skipped.add(failures)
    return DecodedImages(pixels, _replacement(len(dataset), failures), skipped)


@dataclass(frozen=True)
class _Decoder:
    dataset: ImageDataset
    size: tuple[int, int]

    def load(self, indices: range) -> tuple[Tensor, list[ReadFailure]]:
        """The images of one chunk, n 3 h w, zeros for unreadable ones."""
        pixels = np.zeros((len(indices), *self.size, 3), np.uint8)
        failures = []
        for row, index in enumerate(indices):
            try:
                image = self.dataset.read(index)
            except MctfError as error:
                failures.append(ReadFailure(index, str(error)))
                continue
            if (image.height, image.width) != self.size:
                sizes = f"{self.size[1]} x {self.size[0]} and {image.width} x {image.height}"
                raise UnequalSizesError(f"they have several sizes ({sizes})")
            pixels[row] = np.asarray(image)
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), failures


def _replacement(count: int, failures: list[ReadFailure]) -> Tensor:
    """The next readable image for each, by the rule of `ImageDataset.read_or_next`."""
    readable = torch.ones(count, dtype=torch.bool)
    readable[[failure.index for failure in failures]] = False
    if not readable.any():
        raise none_readable(count, failures[0])
    indices = readable.nonzero().squeeze(1)
    return indices[torch.searchsorted(indices, torch.arange(count)) % len(indices)]
