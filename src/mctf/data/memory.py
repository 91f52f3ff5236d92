"""Training images decoded once and kept on the device, which augments them batch by batch.

Axes: B images, 3 h w stored, 3 H W given.
"""

from collections.abc import Iterator

from torch import Tensor

from .batchwise import BatchAugmentation
from .decoding import Decoded
from .examples import Examples
from .feed import FeedOptions
from .moving import send
from .sampling import Order
from .seeds import generator_for


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
