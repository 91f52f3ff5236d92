"""Training batches by a loader: every image is read and augmented anew in every epoch.

Axes: B images, 3 H W.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .dataset import ImageDataset, ReadFailure, SkippedImages
from .feed_options import FeedOptions
from .loader import load_batches
from .resources import num_workers
from .sampler import ResumableSampler, seed_of, seeded
from .transforms import Transform, training_transform


class LoaderFeed:
    """A feed by worker processes (see `num_workers`), or by the training process itself."""

    def __init__(
        self,
        dataset: ImageDataset,
        *,
        sampler: ResumableSampler,
        options: FeedOptions,
        device: torch.device,
        note: str = "",
    ) -> None:
        self.num_classes, self.class_to_idx = dataset.num_classes, dataset.class_to_idx or {}
        self.num_images = len(dataset)
        self.digest = dataset.digest()
        self.workers = num_workers(sampler.steps, device=device, requested=options.workers)
        self.note = note
        self._dataset = dataset
        self._sampler = sampler
        self._options = options
        self._device = device
        self._skipped = SkippedImages()

    @property
    def skipped(self) -> int:
        return len(self._skipped)

    def steps(self) -> int:
        return self._sampler.steps

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        samples = _Augmented(self._dataset, training_transform(self._options), self._options, epoch)
        steps = self._sampler.batches(epoch, start)
        pinned = self._device.type == "cuda"
        for batch in load_batches(samples.load, steps, _collate, workers=self.workers, pin_memory=pinned):
            pixels, labels, failures = batch
            self._skipped.add(failures)
            yield pixels.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)


_Sample = tuple[Tensor, int, list[ReadFailure]]


@dataclass(frozen=True)
class _Augmented:
    """The samples of one epoch."""

    dataset: ImageDataset
    transform: Transform
    options: FeedOptions
    epoch: int

    def load(self, entry: tuple[int, int]) -> _Sample:
        """entry: image index and repeat."""
        image, index, failures = self.dataset.read_or_next(entry[0], skip=self.options.on_corrupt == "skip")
        with seeded(seed_of("sample", self.options.seed, self.epoch, *entry)):
            pixels = self.transform(image)
        assert self.dataset.targets is not None
        return pixels, int(self.dataset.targets[index]), failures


def _collate(samples: list[_Sample]) -> tuple[Tensor, Tensor, list[ReadFailure]]:
    pixels, labels, failures = zip(*samples, strict=True)
    return torch.stack(pixels), torch.tensor(labels), [failure for each in failures for failure in each]
