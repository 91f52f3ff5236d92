"""Training images read and augmented one by one, by worker processes where asked.

Axes: B images, 3 H W.
"""

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import MctfError
from .dataset import Examples, Failure, Unreadable
from .feed import FeedOptions
from .sampler import Order, drawing_from, seed_of
from .transforms import Transform, make_transform


class LoaderFeed:
    """A feed that reads every image anew in every epoch."""

    def __init__(
        self, examples: Examples, *, order: Order, options: FeedOptions, device: torch.device, note: str = ""
    ) -> None:
        self.classes, self.known = examples.classes, examples.known
        self.images = len(examples)
        self.note = note
        self._examples = examples
        self._order = order
        self._options = options
        self._device = device
        self._unreadable = Unreadable()

    @property
    def skipped(self) -> int:
        return len(self._unreadable)

    def steps(self) -> int:
        return self._order.steps

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        loader = DataLoader(
            _Samples(self._examples, make_transform(self._options), self._options),
            batch_sampler=_Steps(self._order, epoch=epoch, start=start),
            num_workers=self._options.workers,
            collate_fn=_collate,
            pin_memory=self._device.type == "cuda",
            worker_init_fn=leave_signals_to_the_parent,
            generator=torch.Generator(),  # else the loader draws a seed from the generator that training uses
        )
        for batch in loader:
            if isinstance(batch, MctfError):
                raise batch
            pixels, labels, failures = batch
            self._unreadable.add(failures)
            yield pixels.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)


def leave_signals_to_the_parent(_worker: int) -> None:
    """Workers outlive a Ctrl-C, which reaches them too, so that training can end in order; they do not inherit
    what training does on SIGTERM, since that is how a loader ends a worker that hangs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


_Place = tuple[int, int, int]  # epoch, image, repeat


class _Steps(Sampler[list[_Place]]):
    """Where the samples of every batch come from."""

    def __init__(self, order: Order, *, epoch: int, start: int) -> None:
        self.order = order
        self.epoch = epoch
        self.start = start

    def __len__(self) -> int:
        return max(0, self.order.steps - self.start)

    def __iter__(self) -> Iterator[list[_Place]]:
        for batch in self.order.batches(self.epoch, self.start):
            yield [(self.epoch, image, repeat) for image, repeat in batch]


@dataclass(frozen=True)
class _Sample:
    pixels: Tensor
    label: int
    failures: tuple[Failure, ...]


class _Samples(Dataset[_Sample | MctfError]):
    """One augmented image, or the error it gave: an error raised in a worker would arrive with its traceback."""

    def __init__(self, examples: Examples, transform: Transform, options: FeedOptions) -> None:
        self.examples = examples
        self.transform = transform
        self.options = options

    def __getitem__(self, place: _Place) -> _Sample | MctfError:
        epoch, index, repeat = place
        try:
            picture, found, failures = self.examples.read(index, skip=self.options.on_corrupt == "skip")
        except MctfError as error:
            return error
        with drawing_from(seed_of("sample", self.options.seed, epoch, index, repeat)):
            pixels = self.transform(picture)
        return _Sample(pixels, int(self.examples.labels[found]), tuple(failures))


def _collate(samples: Sequence[_Sample | MctfError]) -> tuple[Tensor, Tensor, list[Failure]] | MctfError:
    whole = []
    for sample in samples:
        if isinstance(sample, MctfError):
            return sample
        whole.append(sample)
    failures = [failure for sample in whole for failure in sample.failures]
    return torch.stack([sample.pixels for sample in whole]), torch.tensor([sample.label for sample in whole]), failures
