"""Controls to compare methods with: random drop, a floor on fidelity, and free drop, an upper bound on speed.

Axes: B images, N tokens, M after the block.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.selection import drop_assignment
from .base import BlockContext, BlockOps, BlockOutput, Method, check_whole

# The largest prime below 2^26 for which cubing is a bijection; products of two numbers below it are exact in float64.
_PRIME = 67_108_859


class _Drop(Method):
    """Drops r tokens before a block, the same positions in every image, without reading the tokens."""

    min_tokens: ClassVar[int] = 10
    drops: ClassVar[bool] = True
    control: ClassVar[bool] = True

    @abstractmethod
    def kept(self, tokens: int, ctx: BlockContext, device: torch.device) -> Tensor:
        """The positions that are kept, in order: M, int64."""

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        if ctx.r == 0:
            return BlockOutput(block.plain(x), None)
        batch, tokens, _ = x.shape
        index = self.kept(tokens, ctx, x.device)
        kept = torch.zeros(1, tokens, dtype=torch.bool, device=x.device).index_fill(1, index, True).expand(batch, -1)
        assignment, weights = drop_assignment(kept, tokens - ctx.r, protected=ctx.protected), kept.float()
        x = block.fused(assignment, weights).plain(x.index_select(1, index))
        return BlockOutput(x, None, assignment, weights)


@dataclass(frozen=True)
class FreeDrop(_Drop):
    """The free-drop upper bound: the last r tokens are cut off. No method that removes as many can be faster."""

    name: ClassVar[str] = "free_drop"
    summary: ClassVar[str] = "Control: the last tokens are cut off, an upper bound on speed"

    def kept(self, tokens: int, ctx: BlockContext, device: torch.device) -> Tensor:
        return torch.arange(tokens - ctx.r, device=device)


@dataclass(frozen=True)
class RandomDrop(_Drop):
    """Drops r random tokens before each block but the first.

    Which ones follows from the seed, the block's number and the number of tokens alone: the same on every device, eager
    or compiled. Positions are sorted by a hash, which a compiled model computes as well.

    seed: a whole number from 0 on; another seed drops other tokens.
    """

    seed: int = 0

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "Control: random tokens are dropped, a floor on fidelity"

    def __post_init__(self) -> None:
        check_whole(seed=self.seed)

    def kept(self, tokens: int, ctx: BlockContext, device: torch.device) -> Tensor:
        first = torch.arange(ctx.protected, device=device)
        key = (self.seed * 1_000_003 + ctx.index) * 10_007
        order = ctx.protected + _shuffled(tokens - ctx.protected, key, device)
        return torch.cat([first, order[ctx.r :].sort().values])


def _shuffled(count: int, key: int, device: torch.device) -> Tensor:
    """0 .. count - 1 in a pseudo-random order that follows from the key alone.

    Whole numbers of float64 are exact everywhere; a compiler may fold integers into index arithmetic of fewer bits.
    MPS has no float64, so the order is computed on the CPU there.
    """
    key = key % _PRIME
    value = torch.arange(count, dtype=torch.float64, device="cpu" if device.type == "mps" else device) + key
    for _ in range(2):
        value = (value * value % _PRIME * value + key) % _PRIME
    return value.argsort().to(device)
