"""MCTF: multi-criteria token fusion with one-step-ahead attention (paper, sections 3.2 and 3.3).

A block first looks at its own coming attention to see which tokens matter, fuses the r least distinct ones, and
then reuses that attention for the fused tokens. No N x N map is kept: with g the slot of each token and P the
weighted mean over slots, the approximated attention of the paper is

    A_hat v_hat = P softmax(q kT * scale + log s) v_hat[g]

that is, ordinary attention over all N tokens whose values are the fused values spread back by g, then pooled.
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
from ..core.flops import BlockShape, Cost, split_product, unprotected_product
from ..core.matching import Criteria
from ..errors import MctfError, did_you_mean
from .base import BlockContext, BlockOps, BlockOutput, Method, check_bool, run_unfused

_CHOICES = {
    "pooling": ("attention", "size", "mean", "max"),
    "attention": ("one_step_ahead", "precise", "previous", "exact"),
    "informativeness": ("mean", "class", "both", "auto"),
}


@dataclass(frozen=True)
class MCTF(Method):
    """Options are the paper's ablations and one variant of our own; the defaults are the paper's method.

    tau_sim, tau_info, tau_size: temperatures of similarity, informativeness and size; 0 switches one off.
    bidirectional: fuse half of r from alpha to beta and half back; otherwise all from alpha to beta.
    pooling: weights of a fused token's parts: "attention" (times size), "size", "mean"; or their "max".
    attention: "one_step_ahead" reuses the attention it looked at; "precise" computes it anew for the fused
        tokens; "previous" fuses after the MLP by the attention the block has just used; "exact" attends with
        the unfused values and then fuses.
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
        for option in ("tau_sim", "tau_info", "tau_size"):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise MctfError(f"{option}={value!r} must be a finite number, 0 or above (0 switches it off)")
        for option, known in _CHOICES.items():
            value = getattr(self, option)
            if value not in known:
                raise MctfError(f"{option}={value!r} is unknown: {did_you_mean(str(value), known)}")
        check_bool(bidirectional=self.bidirectional, proportional=self.proportional)
        if self.attention == "exact" and self.pooling == "max":
            raise MctfError(
                "pooling='max' has no exact attention: choose another pooling or attention='one_step_ahead'"
            )

    def resolve(self, *, class_token: bool) -> Self:
        if self.informativeness == "auto":
            return replace(self, informativeness="both" if class_token else "mean")
        if self.informativeness != "mean" and not class_token:
            raise MctfError(
                f"informativeness={self.informativeness!r} reads the class token, which this model has not: use 'mean'"
            )
        return self

    def default_blocks(self, depth: int) -> range:
        return range(1, depth)

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        if ctx.r == 0:
            return BlockOutput(run_unfused(block, x, self._counted(sizes)), sizes)
        variants = {"precise": self._precise, "previous": self._previous, "exact": self._exact}
        return variants.get(self.attention, self._ahead)(block, x, sizes, ctx.r, ctx.protected)

    def _ahead(self, block: BlockOps, x: Tensor, sizes: Tensor | None, r: int, protected: int) -> BlockOutput:
        counted = self._counted(sizes)
        q, k = block.queries_keys(block.norm1(x))
        received = block.attention_received(q, k, sizes=counted, rows=self.informativeness, keep=self.pooling != "max")
        assignment, a = self._match(x, received.partial, sizes, r, protected)
        x, new_sizes = self._fuse(x, a, sizes, assignment)

        h = block.norm1(x)
        values = block.split_heads(block.values(h))
        if self.pooling == "max":
            context = _largest_rows(block.attention_map(q, k, sizes=counted), values, assignment)
        else:
            context = block.attend(q, k, values, sizes=counted, unpool=assignment, received=received)
            context, _ = self._fuse(context, a, sizes, assignment)
        x = block.add_mlp(block.add_attention(x, block.finish_context(context, h)))
        return BlockOutput(x, new_sizes, assignment, self._weights(a, sizes), a)

    def _exact(self, block: BlockOps, x: Tensor, sizes: Tensor | None, r: int, protected: int) -> BlockOutput:
        h = block.norm1(x)
        context, received = self._attend_with_received(block, h, sizes)
        assignment, a = self._match(x, received, sizes, r, protected)
        x, context, new_sizes = kernels.fuse_both(
            x, block.finish_context(context, h), self._factor(a), sizes, assignment, by_size=self._by_size
        )
        x = block.add_mlp(block.add_attention(x, context))
        return BlockOutput(x, new_sizes, assignment, self._weights(a, sizes), a)

    def _precise(self, block: BlockOps, x: Tensor, sizes: Tensor | None, r: int, protected: int) -> BlockOutput:
        q, k = block.queries_keys(block.norm1(x))
        received = block.attention_received(q, k, sizes=self._counted(sizes), rows=self.informativeness)
        return self._fused(block, x, received.partial, sizes, r, protected, then_run=True)

    def _previous(self, block: BlockOps, x: Tensor, sizes: Tensor | None, r: int, protected: int) -> BlockOutput:
        h = block.norm1(x)
        context, received = self._attend_with_received(block, h, sizes)
        x = block.add_mlp(block.add_attention(x, block.finish_context(context, h)))
        return self._fused(block, x, received, sizes, r, protected, then_run=False)

    def _fused(
        self,
        block: BlockOps,
        x: Tensor,
        received: Tensor,
        sizes: Tensor | None,
        r: int,
        protected: int,
        *,
        then_run: bool,
    ) -> BlockOutput:
        """Tokens fused, and then perhaps the whole block run on them."""
        assignment, a = self._match(x, received, sizes, r, protected)
        weights = self._weights(a, sizes)
        x, sizes = self._fuse(x, a, sizes, assignment)
        if then_run:
            x = run_unfused(block.fused(assignment, weights), x, self._counted(sizes))
        return BlockOutput(x, sizes, assignment, weights, a)

    def _counted(self, sizes: Tensor | None) -> Tensor | None:
        """The sizes attention is proportional to."""
        return sizes if self.proportional else None

    def _attend_with_received(self, block: BlockOps, h: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = block.queries_keys_values(h)
        return block.attend_with_received(q, k, v, sizes=self._counted(sizes), rows=self.informativeness)

    def _match(
        self, x: Tensor, received: Tensor, sizes: Tensor | None, r: int, protected: int
    ) -> tuple[Assignment, Tensor]:
        """Which tokens become one, and how informative each is."""
        criteria = Criteria(self.tau_sim, self.tau_info, self.tau_size)
        return kernels.match(x, received, sizes, criteria, r=r, protected=protected, bidirectional=self.bidirectional)

    @property
    def _by_size(self) -> bool:
        """Whether a token counts in its slot as often as it stands for others."""
        return self.pooling in ("attention", "size")

    def _factor(self, a: Tensor) -> Tensor | None:
        """What a token counts in its slot besides."""
        return a if self.pooling == "attention" else None

    def _weights(self, a: Tensor, sizes: Tensor | None) -> Tensor:
        """How much each token counts in its slot, B N."""
        return joint_weights(self._factor(a), _counts(a, sizes), self._by_size)

    def _fuse(self, x: Tensor, a: Tensor, sizes: Tensor | None, assignment: Assignment) -> tuple[Tensor, Tensor]:
        """Tokens and sizes of the slots."""
        if self.pooling == "max":
            return assignment.max_pool(x), assignment.total(_counts(a, sizes))
        return kernels.fuse_tokens(x, self._factor(a), sizes, assignment, by_size=self._by_size)

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        if r == 0:
            return Cost(paper=shape.plain(tokens), run=shape.plain(tokens))
        left = tokens - r
        paper_match = split_product(tokens, shape.channels)
        run_match = unprotected_product(tokens, protected, shape.channels)
        reading = shape.norm(tokens) + shape.queries_keys(tokens)
        full = shape.map(tokens, tokens)
        # before attending there is a look at the map, or at its first row, in a pass of its own; a CPU may save it
        column_means = shape.map(1 if self.informativeness == "class" else tokens, tokens)
        if self.attention == "precise":
            rest = reading + shape.plain(left)
            return Cost(paper=rest + full + paper_match, run=rest + column_means + run_match)
        if self.attention == "previous":
            rest = shape.plain(tokens)
            return Cost(paper=rest + paper_match, run=rest + run_match)
        rest = reading + shape.project(left) + shape.mlp_branch(left)
        if self.attention == "exact":
            rest += shape.values(tokens) + full + shape.product(tokens, tokens) + shape.finish_context(tokens)
            return Cost(paper=rest + paper_match, run=rest + run_match)
        rest += shape.norm(left) + shape.values(left) + shape.finish_context(left)
        # The paper multiplies the fused M x M map with the values, and so do we for the maximum; else we attend N x N.
        paper = full + shape.product(left, left)
        run = paper if self.pooling == "max" else full + shape.product(tokens, tokens)
        return Cost(paper=rest + paper_match + paper, run=rest + run_match + column_means + run)


@dataclass(frozen=True)
class MCTFExact(MCTF):
    """MCTF with exact attention, informed by the class token too: fewer launches and closer to the plain model."""

    attention: str = "exact"
    informativeness: str = "auto"

    name: ClassVar[str] = "mctf_exact"
    summary: ClassVar[str] = "MCTF that attends before it fuses: nothing approximated, one pass over q and k"


def _counts(a: Tensor, sizes: Tensor | None) -> Tensor:
    """How many tokens each stands for, B N."""
    return torch.ones_like(a) if sizes is None else sizes


def _largest_rows(full_map: Tensor, values: Tensor, assignment: Assignment) -> Tensor:
    """Max pooling's context: columns of the map summed, rows by maximum, times the fused values: B M (H d).

    full_map: B H N N; values: B H M d. The maximum does not commute with the product, so this one
    ablation does hold the map.
    """
    batch, heads, tokens, _ = full_map.shape
    columns = assignment.sum(full_map.permute(0, 3, 1, 2).flatten(2)).view(batch, -1, heads, tokens)  # B M H N
    rows = assignment.max_pool(columns.permute(0, 3, 2, 1).flatten(2)).view(batch, -1, heads, assignment.count)
    return (rows.transpose(1, 2).to(values.dtype) @ values).transpose(1, 2).flatten(2)
