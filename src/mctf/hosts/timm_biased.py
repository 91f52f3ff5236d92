"""Blocks of timm that add a bias to the attention logits of every pair of places: those with relative positions.

A fused token takes the mean over the pairs of places that two tokens cover, as logits are linear in the bias.

Axes: B images, H heads, N tokens, M tokens after fusion.
"""

from typing import Any, Self

from torch import Tensor

from ..core.assignment import Assignment
from ..core.places import Places, places_after
from ..methods.base import run_pieces
from .timm_ops import TimmOps


class BiasedOps(TimmOps):
    """A block on tokens at these places; shared: what all blocks are called with, a bias of H N N or None.

    A subclass says how the block is called with it, and what it adds of its own.
    """

    argument: str

    def __init__(self, block: Any, shared: Tensor | None, places: Places | None) -> None:
        super().__init__(block)
        self.shared = shared
        self.places = places
        self._bias: Tensor | None = None

    def every_pair(self) -> Tensor | None:
        """The bias of all places of the input, H N N or 1 H N N."""
        raise NotImplementedError

    @property
    def bias(self) -> Tensor | None:
        """That bias while nothing was fused, then its means: B H M M."""
        if self._bias is None:
            every = self.every_pair()
            self._bias = every if every is None or self.places is None else self.places.mean_of_pairs(every)
        return self._bias

    def plain(self, x: Tensor) -> Tensor:
        if self.places is None:
            return self.block(x, **{self.argument: self.shared})
        return run_pieces(self, x, None)  # the block itself would add the bias of all places

    def fused(self, assignment: Assignment, weights: Tensor) -> Self:
        return type(self)(self.block, self.shared, places_after(self.places, assignment, weights))
