"""ATS: adaptive token sampling by inverse transform sampling of token significance, without parameters.

Fayyaz et al., "Adaptive Token Sampling for Efficient Vision Transformers", ECCV 2022. In a sampling block the
significance of token j is s_j = a_j |v_j|: a_j is the class token's attention to it, averaged over heads, v_j its
values over all heads; over the unprotected tokens of an image s sums to 1. Tokens are sorted by rising s, and their
cumulative significance is scaled to 0 .. 1. Each of K evenly spaced levels, from the smallest value above 0 to 1,
samples the token of nearest cumulative significance; the sampled tokens are kept. A token may be sampled several times,
so K is an upper bound, and the least significant token, at 0, is usually dropped. Only queries are cut: kept tokens
have attended to all tokens of the block.

Choices where the paper is silent: distillation and register tokens are kept like the class token; where fewer than
eight tokens would remain, the most significant eight do; tokens keep their order; s has no gradient.

Axes: B images, H heads, N tokens, n of them unprotected, M after the block, K samples, C channels, d channels per head.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..core.attention import TINY, at_least_float32
from ..core.flops import BlockShape, Cost
from ..core.matching import rank_descending
from ..core.schedule import Amount, requested_tokens
from ..core.selection import pack_ragged
from .base import Adaptive, BlockContext, BlockOps, BlockOutput, check_class_token, check_whole, present, run_unfused


@dataclass(frozen=True)
class ATS(Adaptive):
    """K is the same in all sampling blocks: 197 for the 197 tokens of a DeiT, as published, at the default r = 1.

    A larger r (a count, or a ratio of the unprotected tokens that enter the model) lowers K by that number, so that r
    tokens or more are dropped at the first sampling block, and at least one at each later one.
    samples: K for r = 1; None for the number of tokens that enter the model.
    """

    samples: int | None = None

    name: ClassVar[str] = "ats"
    summary: ClassVar[str] = "Adaptive Token Sampling (ECCV 2022): each image samples tokens by attention and values"
    drops: ClassVar[bool] = True
    min_tokens: ClassVar[int] = 8

    def __post_init__(self) -> None:
        check_whole(1, most=1 << 16, optional=True, samples=self.samples)

    def resolve(self, *, class_token: bool) -> Self:
        check_class_token(self.name, class_token)
        return self

    def default_blocks(self, depth: int) -> range:
        """Blocks 3 to 11 of twelve: all after the first quarter."""
        return range(round(depth / 4), depth)

    def num_requested(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """The fewest tokens that sampling drops: it keeps at most what r leaves of the input tokens, and never all."""
        num_remaining = initial - requested_tokens(amount, initial - protected)
        return max(1, tokens - num_remaining) if amount else 0

    def num_reduced(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        requested = self.num_requested(amount, tokens, protected=protected, initial=initial, stage=stage)
        return max(0, min(requested, tokens - self.min_tokens))

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        entered = x.shape[1] if ctx.method_state is None else ctx.method_state
        if ctx.r == 0:
            return BlockOutput(run_unfused(block, x, sizes), sizes, method_state=entered)
        h = block.norm1(x)
        q, k, v = block.queries_keys_values(h)
        context, received = block.attend_with_received(q, k, v, sizes=sizes, rows="class")
        context, a = block.finish_context(context, h), received.sum(dim=1)
        norms = at_least_float32(v).square().sum(dim=(1, 3)).sqrt()
        kept = self._kept(a * norms, present(x, sizes), entered, ctx)
        ragged = pack_ragged(kept, protected=ctx.protected)
        if ragged is None:
            return BlockOutput(
                block.add_mlp(block.add_attention(x, context)), sizes, informativeness=a, method_state=entered
            )
        x = block.add_mlp(block.add_attention(ragged.gather(x), ragged.gather(context)))
        return BlockOutput(x, ragged.sizes, ragged.assignment, ragged.weights, a, method_state=entered)

    @torch.no_grad()
    def _kept(self, significance: Tensor, present: Tensor, entered: int, ctx: BlockContext) -> Tensor:
        """Which tokens are kept, from the significance of all (B N) and the padding mask (B N): B N, bool."""
        first, present = present.split([ctx.protected, present.shape[1] - ctx.protected], dim=1)
        significance = significance[:, ctx.protected :]
        samples = entered if self.samples is None else self.samples
        r = requested_tokens(ctx.amount, entered - ctx.protected)
        if r > 1:
            samples = min(samples, entered - ctx.protected - r)
        least = max(1, self.min_tokens - ctx.protected)
        sampled = sample(significance, present, max(least, samples))
        enough = sampled.sum(dim=1, keepdim=True) >= least
        ranked = rank_descending(significance.where(present, -1)) < least
        return torch.cat([first, torch.where(enough, sampled, ranked & present)], dim=1)

    def cost_of(self, shape: BlockShape, tokens: int, num_remaining: int, *, protected: int) -> Cost:
        """Attention for all queries, of which some are discarded, as published."""
        inputs = shape.norm(tokens) + shape.queries_keys(tokens) + shape.values(tokens) + shape.finish_context(tokens)
        attention = shape.map(tokens, tokens) + shape.product(tokens, tokens)
        cost = inputs + attention + shape.project(num_remaining) + shape.mlp_branch(num_remaining)
        return Cost(paper=cost, run=cost)


def sample(significance: Tensor, present: Tensor, samples: int) -> Tensor:
    """Which tokens at least one of K levels samples: B n, bool.

    significance: B n, non-negative; present: B n, False for padding, which is never sampled.
    """
    significance = at_least_float32(significance) * present
    order = significance.where(present, -1).argsort(dim=1, stable=True)
    real = present.gather(1, order)
    height = significance.gather(1, order).cumsum(dim=1)
    lowest = height.where(real, torch.inf).amin(dim=1, keepdim=True)
    height = (height - lowest) / (height[:, -1:] - lowest).clamp_min(TINY)
    height = height.where(real, -1)  # padding comes first in the order, below every level

    start = height.where(height > 0, 1).amin(dim=1, keepdim=True)
    step = torch.linspace(0, 1, samples, dtype=height.dtype, device=height.device)
    level = start + (1 - start) * step  # B K
    above = torch.searchsorted(height, level).clamp_max(height.shape[1] - 1)
    below = (above - 1).clamp_min(0)
    nearer_below = level - height.gather(1, below) <= height.gather(1, above) - level
    sampled = order.gather(1, torch.where(nearer_below, below, above))
    return torch.zeros_like(order).scatter(1, sampled, 1) > 0
