"""Batches by worker processes that return errors as values, and the loader of evaluation.

Axes: B images, 3 H W.
"""

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import MctfError
from .dataset import ImageDataset
from .resources import num_workers
from .transforms import Transform

_CPU = torch.device("cpu")

Key = TypeVar("Key")
Sample = TypeVar("Sample")
Collated = TypeVar("Collated")


@dataclass(frozen=True)
class Batch:
    """pixels: B 3 H W, preprocessed. labels: B, int64; None where classes are unknown."""

    pixels: Tensor
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.pixels)


@dataclass(frozen=True)
class EvalLoader:
    """All images in order, `batch_size` per batch; each iteration starts again.

    workers: loader processes, None for the default of `num_workers` beside a model on `device`.
    """

    dataset: ImageDataset
    transform: Transform
    batch_size: int = 32
    workers: int | None = None
    device: torch.device = _CPU

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        workers = num_workers(len(self), device=self.device, requested=self.workers)
        indices = range(len(self.dataset))
        batches = [indices[start : start + self.batch_size] for start in range(0, len(indices), self.batch_size)]
        for batch, pixels in zip(batches, load_batches(self.load, batches, torch.stack, workers=workers), strict=True):
            targets = self.dataset.targets
            yield Batch(pixels, None if targets is None else targets[batch.start : batch.stop])

    def load(self, index: int) -> Tensor:
        """One preprocessed image, 3 H W."""
        return self.transform(self.dataset.read(index))


def load_batches(
    load: Callable[[Key], Sample],
    batches: Iterable[Sequence[Key]],
    collate: Callable[[list[Sample]], Collated],
    *,
    workers: int,
    pin_memory: bool = False,
) -> Iterator[Collated]:
    """`collate` of `load(key)` for the keys of every batch, in order; raises an MctfError of a worker as it was raised.

    load and collate must be picklable where worker processes are spawned.
    """
    loader: Iterable[Any] = DataLoader(
        SafeDataset(load),
        batch_sampler=batches,  # type: ignore[arg-type]  # any sequence of keys serves
        num_workers=workers,
        collate_fn=partial(_collate, collate),
        pin_memory=pin_memory,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # else the loader draws its seed from torch's global generator
    )
    for batch in loader:
        if isinstance(batch, MctfError):
            raise batch
        yield batch


class SafeDataset(Dataset[Sample | MctfError]):
    """`load(key)`, or the MctfError that it raises.

    An exception that a worker raises reaches the main process with the worker's whole traceback as its message.
    """

    def __init__(self, load: Callable[[Any], Sample]) -> None:
        self.load = load

    def __getitem__(self, key: Any) -> Sample | MctfError:
        try:
            return self.load(key)
        except MctfError as error:
            return error


def first_error(samples: Iterable[object]) -> MctfError | None:
    return next((sample for sample in samples if isinstance(sample, MctfError)), None)


def _collate(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    return first_error(samples) or collate(samples)


def _ignore_signals(_worker: int) -> None:
    """Ctrl-C reaches workers, too: they go on, so that training can finish its step and save.

    SIGTERM gets its default action back: it is how a loader ends a worker, and training handles it otherwise.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
