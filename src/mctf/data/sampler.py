"""Resumable shuffling: order and random numbers are pure functions of seed, epoch, step and rank."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .._utils import plural
from ..errors import MctfError

_TORCH_SEED_BITS = 63
_NUMPY_SEED_BITS = 32


def seed_of(*parts: int | str) -> int:
    """One seed per list of integers and strings; different lists have unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**_TORCH_SEED_BITS


def generator_for(*parts: int | str) -> torch.Generator:
    """A CPU generator with that seed: the numbers do not depend on the device of the model."""
    return torch.Generator().manual_seed(seed_of(*parts))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global generators of Python, numpy and torch (CPU), and restores their states at the end.

    timm's and torchvision's transforms draw from all three. CUDA generators keep their state, which
    `torch.manual_seed` would change: drop path and dropout on the GPU draw from them.
    """
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**_NUMPY_SEED_BITS)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


@dataclass(frozen=True)
class ResumableSampler:
    """The order of the images in every epoch for one rank; it holds no state, so resuming needs none.

    An epoch shuffles the images and lists each `repeats` times in a row. Ranks take entries round-robin: no two get
    the same entry, and the repeats of an image go to neighboring ranks of one step (with fewer ranks than repeats,
    into one batch). An epoch ends after as many entries as there are images, in whole batches on every rank. With
    repeats it shows fewer images, each more often.

    batch_size: images per step of this rank. seed: the same on every rank.
    """

    num_images: int
    batch_size: int
    seed: int = 0
    repeats: int = 1
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise MctfError(f"rank {self.rank} is out of range: expected 0 to {self.world_size - 1}")
        if self.steps == 0:
            ranks = "" if self.world_size == 1 else f" in each of {self.world_size} processes"
            raise MctfError(
                f"{plural(self.num_images, 'image')} cannot fill one batch of {self.batch_size}{ranks}: lower the "
                "batch size or give more images"
            )

    @property
    def steps(self) -> int:
        """Whole batches per epoch, the same number on every rank."""
        return self.num_images // self.world_size // self.batch_size

    def entries(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Image index and repeat of every entry of this rank; both int64, whole batches."""
        shuffled = torch.randperm(self.num_images, generator=generator_for("order", self.seed, epoch))
        entries = torch.arange(self.rank, self.num_images * self.repeats, self.world_size)
        entries = entries[: self.steps * self.batch_size]
        return shuffled[entries // self.repeats], entries % self.repeats

    def batches(self, epoch: int, start: int = 0) -> Iterator[list[tuple[int, int]]]:
        """Image index and repeat of every entry, one list per step, from step `start` on."""
        images, repeats = self.entries(epoch)
        for step in range(start, self.steps):
            batch = slice(step * self.batch_size, (step + 1) * self.batch_size)
            yield list(zip(images[batch].tolist(), repeats[batch].tolist(), strict=True))
