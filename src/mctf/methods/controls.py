"""Dropping tokens by chance: the floor that any method which looks at its tokens must rise above.

Not a method to use. Before each block r of the unprotected tokens go. Which ones follows from the seed, the number of
the block and the number of tokens alone: the same places for every image, in every batch, on every device, eager or
compiled. No generator is asked: places are sorted by a hash, which a compiled model computes as well.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.assignment import Assignment
from ..core.flops import BlockShape, Cost
from ..errors import MctfError
from .base import BlockContext, BlockOps, BlockOutput, Method

# The largest prime below 2^26 for which cubing mixes all numbers below it; products of two stay exact in float64.
_PRIME = 67_108_859


@dataclass(frozen=True)
class RandomDrop(Method):
    """Drops r tokens before each block but the first, whatever they show.

    seed: a whole number from 0 on; another seed drops other tokens.
    """

    seed: int = 0

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "Control: tokens are dropped by chance, the floor on fidelity"
    min_tokens: ClassVar[int] = 10

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise MctfError(f"seed={self.seed!r} must be a whole number from 0 to 2**32 - 1")

    def default_blocks(self, depth: int) -> range:
        return range(1, depth)

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        if ctx.r == 0:
            return BlockOutput(block.plain(x), None)
        batch, tokens, _ = x.shape
        first, index = ctx.protected, torch.arange(tokens, device=x.device)
        order = first + _shuffled(tokens - first, (self.seed * 1_000_003 + ctx.index) * 10_007, x.device)
        stays = torch.ones_like(index).index_fill(0, order[: ctx.r], 0)
        kept = torch.cat([index[:first], order[ctx.r :].sort().values])
        # To have a place at all, a dropped token is mapped to the one before it that stays, or to the first of those
        # that are not protected; there it counts for nothing.
        slots = torch.maximum(stays.cumsum(0) - 1, index.clamp_max(first))
        assignment = Assignment(slots.expand(batch, -1), tokens - ctx.r)
        weights = stays.float().expand(batch, -1)
        return BlockOutput(block.fused(assignment, weights).plain(x.index_select(1, kept)), None, assignment, weights)

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        cost = shape.plain(tokens - r)
        return Cost(paper=cost, run=cost)


def _shuffled(places: int, key: int, device: torch.device) -> Tensor:
    """0 .. places - 1 in an order that looks random and follows from the key alone.

    In whole numbers of float64, exact everywhere: a compiler folds integers into index arithmetic of fewer bits.
    """
    key = key % _PRIME
    value = torch.arange(places, dtype=torch.float64, device=device) + key
    for _ in range(2):
        value = (value * value % _PRIME * value + key) % _PRIME
    return value.argsort()


# MERGED from mctf.methods.controls:
# Dropping tokens for nothing: the ceiling on what any method that leaves as many tokens can gain.
#
# Not a method to use: the last r tokens of the sequence are cut off before the block, without looking at them.


@dataclass(frozen=True)
class FreeDrop(Method):
    """Cuts off the last r tokens before each block."""

    name: ClassVar[str] = "free_drop"
    summary: ClassVar[str] = "Control: the last tokens are cut off unseen, the ceiling on speed"
    min_tokens: ClassVar[int] = 10

    def default_blocks(self, depth: int) -> range:
        return range(1, depth)

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        if ctx.r == 0:
            return BlockOutput(block.plain(x), None)
        batch, tokens, _ = x.shape
        left = tokens - ctx.r
        # to have a place at all, a dropped token is mapped to the last one that stays, where it counts for nothing
        index = torch.arange(tokens, device=x.device)
        assignment = Assignment(index.clamp_max(left - 1).expand(batch, -1), left)
        weights = (index < left).float().expand(batch, -1)
        return BlockOutput(block.fused(assignment, weights).plain(x[:, :left]), None, assignment, weights)

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        cost = shape.plain(tokens - r)
        return Cost(paper=cost, run=cost)
