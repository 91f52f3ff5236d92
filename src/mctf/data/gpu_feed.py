"""All images decoded once, by several processes, into one tensor on a device.

Axes: N images, 3 h w, uint8.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import MctfError
from .dataset import Examples, Failure, Unreadable
from .feed import FeedOptions
from .gpu_augment import BatchAugmentation
from .gpu_randaugment import send
from .loader_feed import leave_signals_to_the_parent
from .sampler import Order, generator_for

Progress = Callable[[int, int], None]  # images decoded so far, images in all

_CHUNK_BYTES = 2**20  # a few chunks a process lie in shared memory, of which containers have little
_FEW = 2000  # images that one process has decoded before others have started


class UnequalSizesError(Exception):
    """Images of several sizes, which do not fit into one tensor."""


@dataclass(frozen=True)
class Decoded:
    """pixels: N 3 h w, uint8. standing_in: N, int64, the readable image that is shown for each."""

    pixels: Tensor
    standing_in: Tensor
    unreadable: Unreadable


def decode(
    examples: Examples,
    *,
    size: tuple[int, int],
    device: torch.device,
    processes: int,
    skip: bool = True,
    progress: Progress | None = None,
) -> Decoded:
    """Every image, all of height and width `size`; raises UnequalSizesError where one has another.

    skip: see `Examples.read`; without it an unreadable image raises MctfError.
    """
    chunks = _Chunks(examples, size, step=max(1, _CHUNK_BYTES // (3 * size[0] * size[1])))
    loader = DataLoader(
        chunks,
        batch_size=None,
        num_workers=processes if len(examples) > _FEW else 0,
        worker_init_fn=leave_signals_to_the_parent,
        generator=torch.Generator(),  # else the loader draws a seed from the generator that training uses
    )
    pixels = torch.empty(len(examples), 3, *size, dtype=torch.uint8, device=device)
    failures: list[Failure] = []
    done = 0
    for chunk in loader:
        if isinstance(chunk, Exception):
            raise chunk
        failures += chunk.failures
        if failures and not skip:
            examples.read(failures[0].index, skip=False)  # raises, saying what can be done
        pixels[done : done + len(chunk.pixels)] = chunk.pixels
        done += len(chunk.pixels)
        if progress is not None:
            progress(done, len(examples))
    unreadable = Unreadable()
    unreadable.add(failures)
    return Decoded(pixels, _stand_in(len(examples), failures), unreadable)


def processes_for(world: int) -> int:
    """A fair share of the cores for each of `world` training processes, of which torchrun says how many are here."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", world)))


def _stand_in(count: int, failures: list[Failure]) -> Tensor:
    """The next readable image for each, by the rule of `Examples.read`."""
    readable = torch.ones(count, dtype=torch.bool)
    readable[[failure.index for failure in failures]] = False
    if not readable.any():
        raise MctfError(f"none of {count} images is readable, the first being: {failures[0].reason}")
    good = readable.nonzero().squeeze(1)
    following = torch.searchsorted(good, torch.arange(count))
    return good[following % len(good)]


@dataclass(frozen=True)
class _Chunk:
    pixels: Tensor
    failures: list[Failure]


class _Chunks(Dataset[_Chunk | Exception]):
    """Runs of `step` images; errors travel as values, without the traceback of a worker."""

    def __init__(self, examples: Examples, size: tuple[int, int], *, step: int) -> None:
        self.examples = examples
        self.size = size
        self.step = step

    def __len__(self) -> int:
        return -(-len(self.examples) // self.step)

    def __getitem__(self, number: int) -> _Chunk | Exception:
        indices = range(number * self.step, min((number + 1) * self.step, len(self.examples)))
        pixels = np.zeros((len(indices), *self.size, 3), np.uint8)
        failures = []
        for place, index in enumerate(indices):
            try:
                pixels[place] = self._pixels(self.examples.source.read(index))
            except UnequalSizesError as error:
                return error
            except MctfError as error:
                failures.append(Failure(index, str(error)))
        return _Chunk(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), failures)

    def _pixels(self, picture: Image.Image) -> np.ndarray:
        if (picture.height, picture.width) != self.size:
            sizes = f"{self.size[1]} x {self.size[0]} and {picture.width} x {picture.height}"
            raise UnequalSizesError(f"they have several sizes ({sizes})")
        return np.asarray(picture)


# MERGED from mctf.data.gpu_feed:
# Training images decoded once and kept on the device, which augments them batch by batch.
#
# Axes: B images, 3 h w stored, 3 H W given.


class MemoryFeed:
    """A feed that touches no file once it is made."""

    def __init__(
        self, examples: Examples, decoded: Decoded, *, order: Order, options: FeedOptions, note: str = ""
    ) -> None:
        self.classes, self.known = examples.classes, examples.known
        self.images = len(examples)
        self.note = note
        self._device = decoded.pixels.device
        self._pixels = decoded.pixels
        self._labels = examples.labels.to(self._device)
        self._standing_in = decoded.standing_in
        self._unreadable = decoded.unreadable
        self._order = order
        self._augment = BatchAugmentation(options, self._device)

    @property
    def skipped(self) -> int:
        return len(self._unreadable)

    def steps(self) -> int:
        return self._order.steps

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        order = self._order
        rows = send(self._standing_in[order.views(epoch)[0]], self._device)
        for step in range(start, order.steps):
            chosen = rows[step * order.batch : (step + 1) * order.batch]
            generator = generator_for("batch", order.seed, epoch, step, order.rank)
            yield self._augment(self._pixels[chosen], generator), self._labels[chosen]
