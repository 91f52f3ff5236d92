"""Ward: tokens clustered by Ward's cost, attention exact, from a quarter of the depth on.

A token's weight is the attention that it receives, times the root of its size. Two tokens are fused where that adds
least to the weighted squared error of the tokens. There is no temperature and nothing to train. In a `dense` model all
input tokens count alike: a token's weight is its size.

Axes: B images, N tokens, M = N - r tokens after fusion, C channels.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from .. import kernels
from ..core.flops import BlockShape
from ..core.schedule import Amount, ReductionSpec, plain_r
from ..errors import MctfError, shown
from .base import (
    INFORMATIVENESS,
    BlockContext,
    BlockOps,
    BlockOutput,
    Method,
    check_bool,
    check_choice,
    check_number,
    check_whole,
    resolve_informativeness,
    run_unfused,
)

_LARGE_MATCHING = 0.2  # share of a block's cost: from 1,200 tokens of 192 channels on, or 2,300 of 384


@dataclass(frozen=True)
class Ward(Method):
    """Options are the parts that can be changed; the defaults are the method.

    rounds: of clustering per block; more come closer to fusing one pair at a time.
    candidates: cheapest tokens, per token that is fused, among which later rounds choose.
    proportional: add log(size) to the attention logits of fused keys.
    norm: give a fused token the mean norm of its members; their mean alone is shorter.
    spacing: blocks from one that fuses to the next; by default 1, and 2 where comparing all tokens would be more than a
        fifth of a block's cost.
    informativeness: attention received from all tokens ("mean"), from the "class" token, or the mean of "both";
        "auto" is "both" where there is a class token and "mean" elsewhere.
    """

    rounds: int = 2
    candidates: float = 1.5
    proportional: bool = True
    norm: bool = True
    spacing: int | None = None
    informativeness: str = "auto"

    name: ClassVar[str] = "ward"
    summary: ClassVar[str] = "Ward's clustering of tokens weighted by attention and size, attention exact; no training"
    default_r: ClassVar[float] = 0.2
    min_tokens: ClassVar[int] = 10
    trims_last: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole(1, most=64, rounds=self.rounds)
        check_number(candidates=self.candidates)
        if self.candidates < 1:
            raise MctfError(f"candidates={shown(self.candidates)} leaves too few to fuse: write 1.5")
        check_whole(1, optional=True, spacing=self.spacing)
        check_bool(proportional=self.proportional, norm=self.norm)
        check_choice(informativeness=(self.informativeness, INFORMATIVENESS))

    def resolve(self, *, class_token: bool) -> Self:
        return replace(self, informativeness=resolve_informativeness(self.informativeness, class_token))

    def fit(self, shapes: Callable[[], Sequence[BlockShape]], tokens: Callable[[], int]) -> Self:
        if self.spacing is not None:
            return self
        shape, count = shapes()[0], tokens()
        matching = count**2 * shape.channels
        return replace(self, spacing=2 if matching > _LARGE_MATCHING * (shape.plain(count) + matching) else 1)

    def default_blocks(self, depth: int) -> range:
        """From a quarter of the depth on, but for the last block: 3 to 10 of twelve."""
        return range(depth // 4, max(depth // 4 + 1, depth - 1), self.spacing or 1)

    def make_schedule(self, r: ReductionSpec, *, depth: int, blocks: Iterable[int] | None) -> tuple[Amount, ...]:
        """A ratio acts from a quarter of the depth on. Below 0.2 it begins later, above 0.3 earlier: that loses less.

        Where it begins between two blocks, the first of them fuses a part of it, so that no cost is out of reach.
        Blocks that are named, or spaced, fuse the whole ratio.
        """
        schedule = super().make_schedule(r, depth=depth, blocks=blocks)
        ratio = None if isinstance(r, (str, Sequence)) else plain_r(r)
        if blocks is not None or not isinstance(ratio, float) or (self.spacing or 1) > 1:
            return schedule
        twelfths = 3 + max(0.2 - ratio, 0) / 0.05 - max(ratio - 0.3, 0) / 0.05
        end = max(depth - 1, 1)
        start = min(min(max(twelfths, 2), 6) * depth / 12, end - 1)
        return tuple(ratio * min(max(block + 1 - start, 0), 1) if block < end else 0 for block in range(depth))

    def can_trim(self, *, reduces: bool) -> bool:
        return True

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """Attend with all tokens, then fuse tokens and context before projection and MLP."""
        key_sizes = self.key_sizes(sizes)
        if ctx.r == 0:
            return BlockOutput(run_unfused(block, x, key_sizes), sizes)
        h = block.norm1(x)
        q, k, v = block.queries_keys_values(h)
        if ctx.dense:
            context, received = block.attend(q, k, v, sizes=key_sizes), None
        else:
            context, received = block.attend_with_received(q, k, v, sizes=key_sizes, rows=self.informativeness)
        context = block.finish_context(context, h)
        assignment, a, weights = kernels.cluster(
            x,
            received,
            sizes,
            r=ctx.r,
            protected=ctx.protected,
            rounds=self.rounds,
            candidates=self.candidates,
        )
        x, context, new_sizes = kernels.merge(
            x, assignment, weights=weights, sizes=sizes, also=context, keep_norm=self.norm
        )
        x = block.add_mlp(block.add_attention(x, context))
        return BlockOutput(x, new_sizes, assignment, weights, a)

    def run_macs(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> int:
        if r == 0:
            return shape.plain(tokens)
        matching = (tokens - protected) ** 2 * shape.channels
        return shape.attention_branch(tokens) - shape.project(r) + matching + shape.mlp_branch(tokens - r)
