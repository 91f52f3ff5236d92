"""Methods under which each image decides for itself how many tokens remain.

A plan cannot know what images will decide, so it gives the most that can remain; `analysis.measured` counts what
remains of real images. Batches are padded to the fullest image (`core.packing`), so a batch is as fast as its fullest
image, and one image alone is never padded. The shapes depend on the data: `torch.compile` breaks its graph at every
block that decides, and fullgraph=True is refused.
"""

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from ..core.cost import BlockShape, Cost
from ..core.schedule import Entry, ReductionSpec
from .base import Method


class Adaptive(Method):
    """A method whose blocks decide, image by image, how many tokens go on; r says at which blocks, by not being 0."""

    default_r: ClassVar[ReductionSpec] = 1
    adaptive: ClassVar[bool] = True

    def asked(self, entry: Entry, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        return 0

    def leaving(self, entry: Entry, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """None, as none is bound to leave."""
        return 0

    @abstractmethod
    def cost_of(self, shape: BlockShape, tokens: int, remaining: int, *, protected: int) -> Cost:
        """Multiply-adds of a block that decides, of whose tokens these remain."""

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        if r == 0:
            return Cost(paper=shape.plain(tokens), run=shape.plain(tokens))
        return self.cost_of(shape, tokens, tokens - r, protected=protected)


def present(x: Tensor, sizes: Tensor | None) -> Tensor:
    """Which of the tokens x (B N C) are there and no padding: B N, bool."""
    return x.new_ones(x.shape[:2]).bool() if sizes is None else sizes > 0
