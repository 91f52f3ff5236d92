"""Which images a process sees in which step of an epoch: a pure function, so that resuming needs no state."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MctfError
from .seeds import generator_for


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
