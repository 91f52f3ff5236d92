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

from ..core.flops import BlockShape, Cost
from ..core.matching import TINY, at_least_float32, rank_descending
from ..core.schedule import Amount, requested_tokens
from ..core.selection import pack_ragged
from ..errors import MctfError
from .base import Adaptive, BlockContext, BlockOps, BlockOutput, check_class_token, present, run_unfused


@dataclass(frozen=True)
class ATS(Adaptive):
    """K is the same in all sampling blocks: 197 for the 197 tokens of a DeiT, as published, at the default r = 1.

    A larger r (a count, or a ratio of the unprotected tokens that enter the model) lowers K to as many as it leaves of
    those. So r tokens or more leave at the first sampling block, and then at least one at each.
    samples: K for r = 1; None for as many as tokens enter the model.
    """

    samples: int | None = None

    name: ClassVar[str] = "ats"
    summary: ClassVar[str] = "Adaptive Token Sampling (ECCV 2022): each image samples tokens by attention and values"
    min_tokens: ClassVar[int] = 8

    def __post_init__(self) -> None:
        whole = isinstance(self.samples, int) and not isinstance(self.samples, bool) and self.samples >= 1
        if self.samples is not None and not whole:
            raise MctfError(f"samples={self.samples!r} must be a whole number from 1 on, or None for all tokens")

    def resolve(self, *, class_token: bool) -> Self:
        check_class_token(self.name, class_token)
        return self

    def default_blocks(self, depth: int) -> range:
        """Blocks 3 to 11 of twelve: all after the first quarter."""
        return range(round(depth / 4), depth)

    def num_requested(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """What sampling takes at least: it leaves no more than r leaves of the first tokens, and never all."""
        remaining = initial - requested_tokens(amount, initial - protected)
        return max(1, tokens - remaining) if amount else 0

    def num_reduced(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        asked = self.num_requested(amount, tokens, protected=protected, initial=initial, stage=stage)
        return max(0, min(asked, tokens - self.min_tokens))

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        entered = x.shape[1] if ctx.method_state is None else ctx.method_state
        if ctx.r == 0:
            return BlockOutput(run_unfused(block, x, sizes), sizes, method_state=entered)
        h = block.norm1(x)
        q, k, v = block.queries_keys_values(h)
        context, received = block.attend_with_received(q, k, v, sizes=sizes, rows="class")
        context, a = block.finish_context(context, h), received.sum(dim=1)
        there = present(x, sizes)
        stays = self._stays(a * _lengths(v), there, entered, ctx)
        packing = pack_ragged(stays, protected=ctx.protected)
        if packing is None:
            return BlockOutput(
                block.add_mlp(block.add_attention(x, context)), sizes, informativeness=a, method_state=entered
            )
        x = block.add_mlp(block.add_attention(packing.gather(x), packing.gather(context)))
        return BlockOutput(x, packing.sizes, packing.assignment, packing.weights, a, method_state=entered)

    @torch.no_grad()
    def _stays(self, significance: Tensor, there: Tensor, entered: int, ctx: BlockContext) -> Tensor:
        """Which tokens stay, from the significance of all (B N) and whether they are there or padding: B N, bool."""
        first, there = there.split([ctx.protected, there.shape[1] - ctx.protected], dim=1)
        significance = significance[:, ctx.protected :]
        least = max(1, self.min_tokens - ctx.protected)
        sampled = sample(significance, there, max(least, self._samples(entered, ctx)))
        enough = sampled.sum(dim=1, keepdim=True) >= least
        ranked = rank_descending(significance.where(there, -1)) < least
        return torch.cat([first, torch.where(enough, sampled, ranked & there)], dim=1)

    def _samples(self, entered: int, ctx: BlockContext) -> int:
        """K, with so many tokens entering the first block."""
        most = entered if self.samples is None else self.samples
        r = requested_tokens(ctx.amount, entered - ctx.protected)
        return most if r <= 1 else min(most, entered - ctx.protected - r)

    def cost_of(self, shape: BlockShape, tokens: int, remaining: int, *, protected: int) -> Cost:
        """The paper's account and ours: attention for all queries, of which some are thrown away, as published."""
        reading = shape.norm(tokens) + shape.queries_keys(tokens) + shape.values(tokens) + shape.finish_context(tokens)
        attending = shape.map(tokens, tokens) + shape.product(tokens, tokens)
        cost = reading + attending + shape.project(remaining) + shape.mlp_branch(remaining)
        return Cost(paper=cost, run=cost)


def sample(significance: Tensor, there: Tensor, samples: int) -> Tensor:
    """Which tokens answer to one of K samples: B n, bool.

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
    step = torch.linspace(0, 1, samples, dtype=height.dtype, device=height.device)
    level = start + (1 - start) * step  # B K
    above = torch.searchsorted(height, level).clamp_max(height.shape[1] - 1)
    below = (above - 1).clamp_min(0)
    nearer_below = level - height.gather(1, below) <= height.gather(1, above) - level
    answers = order.gather(1, torch.where(nearer_below, below, above))
    return torch.zeros_like(order).scatter(1, answers, 1) > 0


def _lengths(v: Tensor) -> Tensor:
    """Length of each token's values over all heads, B H N d -> B N."""
    return at_least_float32(v).square().sum(dim=(1, 3)).sqrt()
