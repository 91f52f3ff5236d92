"""ATS: each image samples the tokens it needs by their significance, without parameters.

Fayyaz et al., "Adaptive Token Sampling for Efficient Vision Transformers", ECCV 2022. In a sampling block the
significance of token j is s_j = a_j |v_j|, a_j being the class token's attention to it, averaged over heads, and v_j
its values of all heads; over the unprotected tokens of an image s sums to 1. The tokens are sorted by rising s, and
their cumulated significance is brought to the range 0 .. 1. K numbers at even distances, from the smallest above 0 to
1, are each answered by the token whose cumulated significance is nearest; every token that answers stays. One token may
answer often, so K is only the most that can remain, and the least significant token, at 0, goes as a rule.
Only queries are cut: what stays has attended to all tokens of the block.

Choices where the paper is silent: distillation and register tokens stay like the class token; where fewer than eight
tokens would remain, the most significant ones do; tokens keep their order; s has no gradient.

Axes: B images, H heads, N tokens, n of them unprotected, M after the block, K samples, C channels, d channels a head.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..core.cost import BlockShape, Cost
from ..core.criteria import TINY, at_least_float32
from ..core.matching import rank_descending
from ..core.packing import pack
from ..core.schedule import Entry, tokens_asked
from ..errors import MctfError
from .adaptive import Adaptive, present
from .base import BlockOps, Step, Turn, run_unfused


@dataclass(frozen=True)
class ATS(Adaptive):
    """r tokens or more leave each image in a sampling block; r = 1, the default, asks no more than sampling does.

    samples: K of every sampling block; None for as many as tokens enter the model, 197 in a DeiT, as published. An
        r above 1 lowers it in each block to the number of tokens that are to remain.
    """

    samples: int | None = None

    name: ClassVar[str] = "ats"
    summary: ClassVar[str] = "Adaptive Token Sampling (ECCV 2022): each image samples tokens by attention and values"
    min_tokens: ClassVar[int] = 8

    def __post_init__(self) -> None:
        whole = isinstance(self.samples, int) and not isinstance(self.samples, bool) and self.samples >= 1
        if self.samples is not None and not whole:
            raise MctfError(f"samples={self.samples!r} must be a whole number from 1 on, or None for all tokens")

    def suited(self, *, class_token: bool) -> Self:
        if not class_token:
            raise MctfError(
                f"method {self.name!r} ranks tokens by the attention of the class token, which this model's blocks "
                "have not: use 'mctf' or 'tome'"
            )
        return self

    def default_blocks(self, depth: int) -> range:
        """Blocks 3 to 11 of twelve: all after the first quarter."""
        return range(round(depth / 4), depth)

    def asked(self, entry: Entry, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        return tokens_asked(entry, tokens - protected)

    def leaving(self, entry: Entry, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        return max(0, min(tokens_asked(entry, tokens - protected), tokens - self.min_tokens))

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, turn: Turn) -> Step:
        entered = x.shape[1] if turn.carry is None else turn.carry
        if turn.r == 0:
            return Step(run_unfused(block, x, sizes), sizes, carry=entered)
        h = block.norm1(x)
        q, k, v = block.queries_keys_values(h)
        context, a = block.attend_and_look(q, k, v, sizes=sizes, rows="class")
        context = block.finish_context(context, h)
        there = present(x, sizes)
        stays = self._stays(a * _lengths(v), there, entered, turn)
        packing = pack(stays, protected=turn.protected)
        if packing is None:
            return Step(block.add_mlp(block.add_attention(x, context)), sizes, informativeness=a, carry=entered)
        x = block.add_mlp(block.add_attention(packing.pick(x), packing.pick(context)))
        return Step(x, packing.sizes, packing.assignment, packing.weights, a, carry=entered)

    @torch.no_grad()
    def _stays(self, significance: Tensor, there: Tensor, entered: int, turn: Turn) -> Tensor:
        """Which tokens stay, from the significance of all (B N) and whether they are there or padding: B N, bool."""
        first, significance, there = (
            there[:, : turn.protected],
            significance[:, turn.protected :],
            there[:, turn.protected :],
        )
        least = max(0, self.min_tokens - turn.protected)
        counts = there.sum(dim=1)
        allowed = _remaining_at_most(turn.entry, counts, least)
        samples = entered if self.samples is None else self.samples
        numbers = torch.where(counts - allowed > 1, allowed.clamp_max(samples), samples)
        sampled = sample(significance, there, numbers, most=samples)
        enough = sampled.sum(dim=1, keepdim=True) >= least
        ranked = rank_descending(significance.where(there, -1)) < least
        return torch.cat([first, torch.where(enough, sampled, ranked & there)], dim=1)

    def cost_of(self, shape: BlockShape, tokens: int, remaining: int, *, protected: int) -> Cost:
        """The paper's account and ours: attention for all queries, of which some are thrown away, as published."""
        reading = shape.norm(tokens) + shape.queries_keys(tokens) + shape.values(tokens) + shape.finish_context(tokens)
        attending = shape.map(tokens, tokens) + shape.product(tokens, tokens)
        cost = reading + attending + shape.project(remaining) + shape.mlp_branch(remaining)
        return Cost(paper=cost, run=cost)


def sample(significance: Tensor, there: Tensor, numbers: Tensor, *, most: int) -> Tensor:
    """Which tokens answer to one of an image's `numbers` (B, at most `most`) of samples: B n, bool.

    significance: B n, not negative; there: B n, False for padding, which never answers.
    """
    significance = at_least_float32(significance) * there
    order = significance.where(there, -1).argsort(dim=1, stable=True)
    real = there.gather(1, order)
    height = significance.gather(1, order).cumsum(dim=1)
    lowest = height.where(real, torch.inf).amin(dim=1, keepdim=True)
    height = (height - lowest) / (height[:, -1:] - lowest).clamp_min(TINY)
    height = height.where(real, -1)  # padding is first in the order and nearest to nothing

    start = height.where(height > 0, 1).amin(dim=1, keepdim=True)
    step = torch.arange(most, device=height.device) / (numbers[:, None] - 1).clamp_min(1)
    drawn = torch.arange(most, device=height.device) < numbers[:, None]  # B K
    level = start + (1 - start) * step.to(height.dtype)
    above = torch.searchsorted(height, level).clamp_max(height.shape[1] - 1)
    below = (above - 1).clamp_min(0)
    nearer_below = level - height.gather(1, below) <= height.gather(1, above) - level
    answers = order.gather(1, torch.where(nearer_below, below, above))
    return torch.zeros_like(order).scatter_add(1, answers, drawn.long()) > 0


def _lengths(v: Tensor) -> Tensor:
    """Length of each token's values over all heads, B H N d -> B N."""
    return at_least_float32(v).square().sum(dim=(1, 3)).sqrt()


def _remaining_at_most(entry: Entry, counts: Tensor, least: int) -> Tensor:
    """How many of an image's tokens (counts, B) may remain by the schedule; not fewer than `least`: B."""
    asked = entry if isinstance(entry, int) else (entry * counts.double() + 1e-9).floor().long()
    return torch.maximum(counts - asked, counts.clamp_max(least))
