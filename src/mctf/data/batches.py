"""Preprocessed images in batches, read by worker processes where asked.

Axes: B images, 3 H W.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import MctfError
from .classes import Labels
from .files import ImageFiles
from .preprocessing import Transform


@dataclass(frozen=True)
class Batch:
    """pixels: B 3 H W, ready for the model. labels: B, int64, None where classes are unknown."""

    pixels: Tensor
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.pixels)


@dataclass(frozen=True)
class Batches:
    """All images in order, `batch_size` at a time; can be iterated again and again.

    workers: processes that read ahead; 0 reads in this one, between the batches.
    """

    images: ImageFiles
    labels: Labels
    transform: Transform
    batch_size: int = 32
    workers: int = 0

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        samples = _Samples(self.images, self.transform)
        loader = DataLoader(samples, self.batch_size, num_workers=self.workers, collate_fn=_stack)
        known = None if self.labels.indices is None else torch.tensor(self.labels.indices)
        start = 0
        for pixels in loader:
            if isinstance(pixels, MctfError):
                raise pixels
            stop = start + len(pixels)
            yield Batch(pixels, None if known is None else known[start:stop])
            start = stop


class _Samples(Dataset[Tensor | MctfError]):
    """One preprocessed image, 3 H W, or the error it gave.

    Errors travel as values: one raised in a worker arrives with its whole traceback for a message.
    """

    def __init__(self, images: ImageFiles, transform: Transform) -> None:
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor | MctfError:
        try:
            return self.transform(self.images.read(index))
        except MctfError as error:
            return error


def _stack(samples: Sequence[Tensor | MctfError]) -> Tensor | MctfError:
    tensors = []
    for sample in samples:
        if isinstance(sample, MctfError):
            return sample
        tensors.append(sample)
    return torch.stack(tensors)
