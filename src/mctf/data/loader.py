"""Batches by worker processes that return errors as values, and the loader of evaluation.

Axes: B images, 3 H W.
"""

import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .._utils import first_line, plural
from ..errors import MctfError
from .dataset import SKIP_HINT, ImageDataset, ReadFailure, SkippedImages, none_readable
from .feed_options import OnCorrupt
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
    on_corrupt: "stop" raises MctfError for an unreadable image; "skip" leaves it out of its batch and counts it.
    """

    dataset: ImageDataset
    transform: Transform
    batch_size: int = 32
    workers: int | None = None
    device: torch.device = _CPU
    on_corrupt: OnCorrupt = "stop"
    _skipped: SkippedImages = field(default_factory=SkippedImages, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    @property
    def skips(self) -> bool:
        return self.on_corrupt == "skip"

    @property
    def skipped(self) -> int:
        """Number of unreadable images that were left out so far, each counted once."""
        return len(self._skipped)

    def __iter__(self) -> Iterator[Batch]:
        workers = num_workers(len(self), device=self.device, requested=self.workers)
        indices = range(len(self.dataset))
        batches = [indices[start : start + self.batch_size] for start in range(0, len(indices), self.batch_size)]
        targets = self.dataset.targets
        found, failure = False, None
        for pixels, rows, failures in load_batches(self._load, batches, _collate_readable, workers=workers):
            self._skipped.add(failures)
            failure = failure or next(iter(failures), None)
            if pixels is not None:
                found = True
                yield Batch(pixels, None if targets is None else targets[rows])
        if failure is not None and not found:
            raise none_readable(len(self.dataset), failure)

    def _load(self, index: int) -> tuple[int, Tensor] | ReadFailure:
        """The index and one preprocessed image, 3 H W."""
        try:
            image = self.dataset.read(index)
        except MctfError as error:
            if not self.skips:
                raise MctfError(f"{error}, or {SKIP_HINT}") from None
            return ReadFailure(index, str(error))
        return index, self.transform(image)


def _collate_readable(
    samples: list[tuple[int, Tensor] | ReadFailure],
) -> tuple[Tensor | None, list[int], list[ReadFailure]]:
    """The readable images of a batch (None where there are none), their indices, and the failures."""
    failures = [sample for sample in samples if isinstance(sample, ReadFailure)]
    readable = [sample for sample in samples if not isinstance(sample, ReadFailure)]
    pixels = torch.stack([pixels for _, pixels in readable]) if readable else None
    return pixels, [index for index, _ in readable], failures


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
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores
            iterator: Iterator[Any] = iter(
                DataLoader(
                    SafeDataset(load),
                    batch_sampler=batches,  # type: ignore[arg-type]  # any sequence of keys serves
                    num_workers=workers,
                    collate_fn=partial(_collate, collate),
                    pin_memory=pin_memory,
                    worker_init_fn=_ignore_signals,
                    generator=torch.Generator(),  # else the loader draws its seed from torch's global generator
                )
            )
        for batch in iterator:
            if isinstance(batch, MctfError):
                raise batch
            yield batch
    except (OSError, RuntimeError) as error:
        if not workers or first_line(error).startswith("Caught "):  # an exception of `load`
            raise
        raise MctfError(  # no process can be started, or one was killed
            f"the {plural(workers, 'loader process', 'loader processes')} failed ({first_line(error)}): "
            "lower --workers, or give more memory and shared memory"
        ) from None


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
