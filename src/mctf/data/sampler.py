"""Random numbers that follow from where training stands, and from nothing that ran before."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import MctfError

_BITS = 63  # what a torch generator takes without a sign
_NUMPY_BITS = 32


def seed_of(*parts: int | str) -> int:
    """One seed for a list of numbers and words. Lists that differ anywhere have unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**_BITS


def generator_for(*parts: int | str) -> torch.Generator:
    """A generator on the CPU for this place, so that every device is given the same numbers."""
    return torch.Generator().manual_seed(seed_of(*parts))


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seeds the global generators of Python, numpy and torch (CPU), and puts their old states back at the end.

    timm's and torchvision's transforms draw from all three. CUDA's generators are left alone: seeding them by
    `torch.manual_seed` would disturb drop-path and dropout on the GPU.
    """
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**_NUMPY_BITS)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


# MERGED from mctf.data.sampler:
# Which images a process sees in which step of an epoch: a pure function, so that resuming needs no state.


@dataclass(frozen=True)
class Order:
    """The order of `images` images in every epoch, for one process of `world`.

    An epoch shuffles the images and lists each `repeated` times in a row. The processes deal that list out like
    cards, so no two see the same entry, and the repeats of an image go to neighbouring processes of one step (or,
    with fewer processes than repeats, into one batch). An epoch ends after as many entries as there are images,
    whole batches of every process only: with repeats it shows fewer images, each more often.

    batch: images a step of this process. seed: the same in all processes.
    """

    images: int
    batch: int
    seed: int = 0
    repeated: int = 1
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise MctfError(
                f"process {self.rank} of {self.world} cannot be: expected a rank from 0 to {self.world - 1}"
            )
        if self.steps == 0:
            raise MctfError(
                f"{self.images} images do not fill one batch of {self.batch} in each of {self.world} processes: "
                "lower the batch size or give more images"
            )

    @property
    def steps(self) -> int:
        """Whole batches an epoch, the same number in every process."""
        return self.images // self.world // self.batch

    def views(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The image of every entry of this process, and which repeat of it this is; both int64, whole batches."""
        shuffled = torch.randperm(self.images, generator=generator_for("order", self.seed, epoch))
        entries = torch.arange(self.rank, self.images * self.repeated, self.world)[: self.steps * self.batch]
        return shuffled[entries // self.repeated], entries % self.repeated

    def batches(self, epoch: int, start: int = 0) -> Iterator[list[tuple[int, int]]]:
        """Image and repeat of every entry, a list a step, from step `start` on."""
        images, repeats = self.views(epoch)
        for step in range(start, self.steps):
            chosen = slice(step * self.batch, (step + 1) * self.batch)
            yield list(zip(images[chosen].tolist(), repeats[chosen].tolist(), strict=True))
