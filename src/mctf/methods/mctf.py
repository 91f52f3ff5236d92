"""MCTF: multi-criteria token fusion with one-step-ahead attention (paper, sections 3.2 and 3.3).

A block computes the column means of its own coming attention, merges the r tokens that are least distinct by three
criteria, and reuses that attention for the fused tokens. No N x N map is kept: with g the slot of each token and P the
weighted mean over slots, the approximated attention of the paper is

    A_hat v_hat = P softmax(q kT * scale + log s) v_hat[g]

that is, ordinary attention over all N tokens whose values are the fused values unpooled by g, then pooled.
The exact variant, which is not in the paper, takes the values before fusion: P softmax(…) v. By linearity that is
plain attention followed by fusion, with nothing approximated and one pass over q and k.

Axes: B images, H heads, N tokens, M = N - r tokens after fusion, C channels.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from .. import kernels
from ..core.assignment import Assignment, joint_weights
from ..core.flops import BlockShape, split_product
from ..core.matching import Criteria
from ..errors import MctfError
from .base import (
    INFORMATIVENESS,
    BlockContext,
    BlockOps,
    BlockOutput,
    Method,
    check_bool,
    check_choice,
    check_number,
    resolve_informativeness,
    run_unfused,
)

_CHOICES = {
    "pooling": ("attention", "size", "mean", "max"),
    "attention": ("one_step_ahead", "precise", "previous", "exact"),
    "informativeness": INFORMATIVENESS,
}


@dataclass(frozen=True)
class MCTF(Method):
    """Options are the paper's ablations and one variant of our own; the defaults are the paper's method.

    tau_sim, tau_info, tau_size: temperatures of similarity, informativeness and size; 0 switches one off.
    bidirectional: merge half of r from alpha into beta and half back; otherwise all from alpha into beta.
    pooling: weights of a fused token's parts: "attention" (times size), "size", "mean"; or their "max".
    attention: "one_step_ahead" reuses the attention that gave the informativeness; "precise" recomputes it for the
        fused tokens; "previous" merges after the MLP by the attention of the same block; "exact" attends with the
        unfused values and then merges.
    informativeness: attention received from all tokens ("mean"), from the "class" token, or the mean of "both";
        "auto" is "both" where there is a class token and "mean" elsewhere.
    proportional: add log(size) to the attention logits of fused keys.
    """

    tau_sim: float = 1.0
    tau_info: float = 1 / 20
    tau_size: float = 1 / 40
    bidirectional: bool = True
    pooling: str = "attention"
    attention: str = "one_step_ahead"
    informativeness: str = "mean"
    proportional: bool = True

    name: ClassVar[str] = "mctf"
    summary: ClassVar[str] = "Multi-criteria Token Fusion (CVPR 2024): similarity, informativeness and size"
    min_tokens: ClassVar[int] = 10

    def __post_init__(self) -> None:
        taus = {"tau_sim": self.tau_sim, "tau_info": self.tau_info, "tau_size": self.tau_size}
        check_number(hint=" (0 switches it off)", **taus)
        check_choice(**{option: (getattr(self, option), choices) for option, choices in _CHOICES.items()})
        check_bool(bidirectional=self.bidirectional, proportional=self.proportional)
        if self.attention == "exact" and self.pooling == "max":
            raise MctfError(
                "pooling='max' has no exact attention: choose another pooling or attention='one_step_ahead'"
            )

    def resolve(self, *, class_token: bool) -> Self:
        return replace(self, informativeness=resolve_informativeness(self.informativeness, class_token))

    def can_trim(self, *, reduces: bool) -> bool:
        return not reduces or self.attention in ("exact", "previous")

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        if ctx.r == 0:
            return BlockOutput(run_unfused(block, x, self.key_sizes(sizes)), sizes)
        variants = {"precise": self._precise, "previous": self._previous, "exact": self._exact}
        return variants.get(self.attention, self._ahead)(block, x, sizes, ctx)

    def _ahead(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """One-step-ahead attention: merge first, then reuse the attention of the unfused tokens."""
        key_sizes = self.key_sizes(sizes)
        q, k = block.queries_keys(block.norm1(x))
        received = block.attention_received(
            q, k, sizes=key_sizes, rows=self.informativeness, keep=self.pooling != "max"
        )
        assignment, a = self._match(x, received.partial, sizes, ctx)
        x, new_sizes = self._merge(x, a, sizes, assignment)

        h = block.norm1(x)
        values = block.split_heads(block.values(h))
        if self.pooling == "max":
            context = _max_pooled_context(block.attention_map(q, k, sizes=key_sizes), values, assignment)
        else:
            context = block.attend(q, k, values, sizes=key_sizes, unpool=assignment, received=received)
            context, _ = self._merge(context, a, sizes, assignment)
        x = block.add_mlp(block.add_attention(x, block.finish_context(context, h)))
        return BlockOutput(x, new_sizes, assignment, self._pool_weights(a, sizes), a)

    def _exact(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """Exact attention: attend with all tokens, then merge tokens and context before projection and MLP."""
        h = block.norm1(x)
        context, received = self._attend(block, h, sizes)
        assignment, a = self._match(x, received, sizes, ctx)
        context = block.finish_context(context, h)
        x, context, new_sizes = kernels.merge(
            x, assignment, weights=self._factor(a), sizes=sizes, by_size=self._by_size, also=context
        )
        x = block.add_mlp(block.add_attention(x, context))
        return BlockOutput(x, new_sizes, assignment, self._pool_weights(a, sizes), a)

    def _precise(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """Merge by one-step-ahead informativeness, then run the whole block on the fused tokens."""
        q, k = block.queries_keys(block.norm1(x))
        received = block.attention_received(q, k, sizes=self.key_sizes(sizes), rows=self.informativeness)
        assignment, a = self._match(x, received.partial, sizes, ctx)
        weights = self._pool_weights(a, sizes)
        x, sizes = self._merge(x, a, sizes, assignment)
        x = run_unfused(block.fused(assignment, weights), x, self.key_sizes(sizes))
        return BlockOutput(x, sizes, assignment, weights, a)

    def _previous(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """Run the whole block, then merge by the attention it used."""
        h = block.norm1(x)
        context, received = self._attend(block, h, sizes)
        x = block.add_mlp(block.add_attention(x, block.finish_context(context, h)))
        assignment, a = self._match(x, received, sizes, ctx)
        weights = self._pool_weights(a, sizes)
        x, sizes = self._merge(x, a, sizes, assignment)
        return BlockOutput(x, sizes, assignment, weights, a)

    def _attend(self, block: BlockOps, h: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = block.queries_keys_values(h)
        return block.attend_with_received(q, k, v, sizes=self.key_sizes(sizes), rows=self.informativeness)

    def _match(self, x: Tensor, received: Tensor, sizes: Tensor | None, ctx: BlockContext) -> tuple[Assignment, Tensor]:
        """The assignment, and the informativeness of each token."""
        criteria = Criteria(self.tau_sim, self.tau_info, self.tau_size)
        r, protected = ctx.r, ctx.protected
        return kernels.match(x, received, sizes, criteria, r=r, protected=protected, bidirectional=self.bidirectional)

    @property
    def _by_size(self) -> bool:
        return self.pooling in ("attention", "size")

    def _factor(self, a: Tensor) -> Tensor | None:
        """Pooling weight of each token beside its size; None for 1."""
        return a if self.pooling == "attention" else None

    def _pool_weights(self, a: Tensor, sizes: Tensor | None) -> Tensor:
        """Pooling weight of each token in its slot, B N."""
        counts = torch.ones_like(a) if sizes is None else sizes
        return joint_weights(self._factor(a), counts, self._by_size)

    def _merge(self, x: Tensor, a: Tensor, sizes: Tensor | None, assignment: Assignment) -> tuple[Tensor, Tensor]:
        """Tokens and sizes of the slots."""
        if self.pooling == "max":
            return assignment.max_pool(x), assignment.total(torch.ones_like(a) if sizes is None else sizes)
        return kernels.merge(x, assignment, weights=self._factor(a), sizes=sizes, by_size=self._by_size)

    def run_macs(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> int:
        if r == 0:
            return shape.plain(tokens)
        if self.pooling == "max":
            return super().run_macs(shape, tokens, r, protected=protected)
        paper_only = split_product(tokens, shape.channels) - split_product(tokens - protected, shape.channels)
        if self.attention == "one_step_ahead":
            paper_only += shape.product(tokens - r, tokens - r) - shape.product(tokens, tokens)
        macs = self.paper_macs(shape, tokens, r, protected=protected) - paper_only
        received = shape.map(1 if self.informativeness == "class" else tokens, tokens)
        if self.attention == "one_step_ahead":
            return macs + received  # column means take a pass of their own
        if self.attention == "precise":
            return macs + received - shape.map(tokens, tokens)
        return macs

    def paper_macs(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> int:
        if r == 0:
            return shape.plain(tokens)
        left = tokens - r
        matching = split_product(tokens, shape.channels)
        inputs, full_map = shape.norm(tokens) + shape.queries_keys(tokens), shape.map(tokens, tokens)
        if self.attention == "precise":
            return inputs + full_map + matching + shape.plain(left)
        if self.attention == "previous":
            return shape.plain(tokens) + matching
        rest = inputs + full_map + matching + shape.project(left) + shape.mlp_branch(left)
        if self.attention == "exact":
            return rest + shape.values(tokens) + shape.product(tokens, tokens) + shape.finish_context(tokens)
        # the paper multiplies the fused M x M map with the values; what runs here attends over N x N
        return rest + shape.norm(left) + shape.values(left) + shape.finish_context(left) + shape.product(left, left)


@dataclass(frozen=True)
class MCTFExact(MCTF):
    """MCTF with exact attention, informed by the class token too: fewer launches, and closer to the baseline."""

    attention: str = "exact"
    informativeness: str = "auto"

    name: ClassVar[str] = "mctf_exact"
    summary: ClassVar[str] = "MCTF that attends before it merges: nothing approximated, one pass over q and k"


def _max_pooled_context(full_map: Tensor, values: Tensor, assignment: Assignment) -> Tensor:
    """Context under max pooling: columns of the map summed, rows by maximum, times the fused values: B M (H d).

    full_map: B H N N; values: B H M d. The maximum does not commute with the product, so this ablation holds the map.
    """
    batch, heads, tokens, _ = full_map.shape
    slots = assignment.count
    columns = assignment.sum(full_map.permute(0, 3, 1, 2).flatten(2)).view(batch, slots, heads, tokens)
    rows = assignment.max_pool(columns.permute(0, 3, 2, 1).flatten(2)).view(batch, slots, heads, slots)
    return (rows.transpose(1, 2).to(values.dtype) @ values).transpose(1, 2).flatten(2)
