"""Dropping tokens for nothing: the ceiling on what any method that leaves as many tokens can gain.

Not a method to use: the last r tokens of the sequence are cut off before the block, without looking at them.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.assignment import Assignment
from ..core.cost import BlockShape, Cost
from .base import BlockOps, Method, Step, Turn


@dataclass(frozen=True)
class FreeDrop(Method):
    """Cuts off the last r tokens before each block."""

    name: ClassVar[str] = "free_drop"
    summary: ClassVar[str] = "Control: the last tokens are cut off unseen, the ceiling on speed"
    min_tokens: ClassVar[int] = 10

    def default_blocks(self, depth: int) -> range:
        return range(1, depth)

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, turn: Turn) -> Step:
        if turn.r == 0:
            return Step(block.plain(x), None)
        batch, tokens, _ = x.shape
        left = tokens - turn.r
        # to have a place at all, a dropped token is mapped to the last one that stays, where it counts for nothing
        index = torch.arange(tokens, device=x.device)
        assignment = Assignment(index.clamp_max(left - 1).expand(batch, -1), left)
        weights = (index < left).float().expand(batch, -1)
        return Step(block.fused(assignment, weights).plain(x[:, :left]), None, assignment, weights)

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        cost = shape.plain(tokens - r)
        return Cost(paper=cost, run=cost)
