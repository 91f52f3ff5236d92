"""MCTF: multi-criteria token fusion with one-step-ahead attention (paper, sections 3.2 and 3.3).

A block first looks at its own coming attention to see which tokens matter, fuses the r least distinct ones, and
then reuses that attention for the fused tokens. No N x N map is kept: with g the slot of each token and P the
weighted mean over slots, the approximated attention of the paper is

    A_hat v_hat = P softmax(q kT * scale + log s) v_hat[g]

that is, ordinary attention over all N tokens whose values are the fused values spread back by g, then pooled.

Axes: B images, H heads, N tokens, M = N - r tokens after fusion, C channels.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core import attention, criteria, matching
from ..core.assignment import Assignment
from ..core.cost import BlockShape, Cost, split_product, unprotected_product
from ..errors import MctfError, did_you_mean
from .base import BlockOps, Step

_POOLINGS = ("attention", "size", "mean", "max")
_ATTENTIONS = ("one_step_ahead", "precise", "previous")


@dataclass(frozen=True)
class MCTF:
    """Options are the paper's ablations; the defaults are its method.

    tau_sim, tau_info, tau_size: temperatures of similarity, informativeness and size; 0 switches one off.
    bidirectional: fuse half of r from alpha to beta and half back; otherwise all from alpha to beta.
    pooling: weights of a fused token's parts: "attention" (times size), "size", "mean"; or their "max".
    attention: "one_step_ahead" reuses the attention it looked at; "precise" computes it anew for the fused
        tokens; "previous" fuses after the MLP by the attention the block has just used.
    proportional: add log(size) to the attention logits of fused keys.
    """

    tau_sim: float = 1.0
    tau_info: float = 1 / 20
    tau_size: float = 1 / 40
    bidirectional: bool = True
    pooling: str = "attention"
    attention: str = "one_step_ahead"
    proportional: bool = True

    name: ClassVar[str] = "mctf"
    summary: ClassVar[str] = "Multi-criteria Token Fusion (CVPR 2024): similarity, informativeness and size"
    min_tokens: ClassVar[int] = 10

    def __post_init__(self) -> None:
        for option in ("tau_sim", "tau_info", "tau_size"):
            value = getattr(self, option)
            if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise MctfError(f"{option}={value!r} must be a finite number, 0 or above (0 switches it off)")
        for option, known in (("pooling", _POOLINGS), ("attention", _ATTENTIONS)):
            value = getattr(self, option)
            if value not in known:
                raise MctfError(f"{option}={value!r} is unknown: {did_you_mean(str(value), known)}")

    def default_blocks(self, depth: int) -> range:
        return range(1, depth)

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, *, r: int, protected: int) -> Step:
        bias = attention.size_bias(sizes, x) if self.proportional else None
        if r == 0:
            return Step(block.plain(x, bias), sizes)
        run = {"one_step_ahead": self._ahead, "precise": self._precise, "previous": self._previous}[self.attention]
        return run(block, x, sizes, bias, r, protected)

    def _ahead(
        self, block: BlockOps, x: Tensor, sizes: Tensor | None, bias: Tensor | None, r: int, protected: int
    ) -> Step:
        q, k = block.queries_keys(block.norm1(x))
        a = attention.informativeness(q, k, bias=bias, scale=block.scale)
        fusion = self._fuse(x, a, sizes, r, protected)

        h = block.norm1(fusion.x)
        values = block.values(h)
        if self.pooling == "max":
            full_map = attention.attention_map(q, k, bias=bias, scale=block.scale)
            context = _largest_rows(full_map, block.split_heads(values), fusion.assignment)
        else:
            spread = block.split_heads(fusion.assignment.spread(values))
            context = attention.attend(q, k, spread, bias=bias, scale=block.scale, dropout=block.attention_dropout)
            context = fusion.assignment.pool(context, fusion.weights)
        x = block.add_mlp(block.add_attention(fusion.x, context, h))
        return Step(x, fusion.sizes, fusion.assignment, a)

    def _precise(
        self, block: BlockOps, x: Tensor, sizes: Tensor | None, bias: Tensor | None, r: int, protected: int
    ) -> Step:
        q, k = block.queries_keys(block.norm1(x))
        a = attention.informativeness(q, k, bias=bias, scale=block.scale)
        fusion = self._fuse(x, a, sizes, r, protected)
        bias = attention.size_bias(fusion.sizes, x) if self.proportional else None
        return Step(block.plain(fusion.x, bias), fusion.sizes, fusion.assignment, a)

    def _previous(
        self, block: BlockOps, x: Tensor, sizes: Tensor | None, bias: Tensor | None, r: int, protected: int
    ) -> Step:
        h = block.norm1(x)
        q, k, v = block.queries_keys_values(h)
        a = attention.informativeness(q, k, bias=bias, scale=block.scale)
        context = attention.attend(q, k, v, bias=bias, scale=block.scale, dropout=block.attention_dropout)
        x = block.add_mlp(block.add_attention(x, context, h))
        fusion = self._fuse(x, a, sizes, r, protected)
        return Step(fusion.x, fusion.sizes, fusion.assignment, a)

    def _fuse(self, x: Tensor, a: Tensor, sizes: Tensor | None, r: int, protected: int) -> "Fusion":
        """Match by the criteria, pool x, add up the sizes."""
        assignment = self._match(x, a, sizes, r, protected)
        counts = torch.ones_like(a) if sizes is None else sizes
        weights = {"attention": a * counts, "size": counts}.get(self.pooling, torch.ones_like(a))
        fused = assignment.largest(x) if self.pooling == "max" else assignment.pool(x, weights)
        return Fusion(fused, assignment.total(counts), weights, assignment)

    @torch.no_grad()
    def _match(self, x: Tensor, a: Tensor, sizes: Tensor | None, r: int, protected: int) -> Assignment:
        unit = criteria.unit_rows(x)
        scores = criteria.attraction(
            matching.alpha(unit, protected), matching.beta(unit, protected), tau_sim=self.tau_sim
        )
        alone = criteria.isolation(a, sizes, tau_info=self.tau_info, tau_size=self.tau_size)
        if alone is not None:
            scores = scores * matching.alpha(alone, protected)[:, :, None] * matching.beta(alone, protected)[:, None]
        match = matching.match_bidirectional if self.bidirectional else matching.match_one_way
        return match(scores, r, protected=protected)

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        if r == 0:
            return Cost(paper=shape.plain(tokens), run=shape.plain(tokens))
        look = shape.norm(tokens) + shape.queries_keys(tokens) + shape.product(tokens, tokens)
        paper_match = split_product(tokens, shape.channels)
        run_match = unprotected_product(tokens, protected, shape.channels)
        left = tokens - r
        if self.attention == "precise":
            rest = shape.plain(left)
            return Cost(paper=look + paper_match + rest, run=look + run_match + rest)
        if self.attention == "previous":
            plain = shape.plain(tokens)
            return Cost(paper=plain + paper_match, run=plain + shape.product(tokens, tokens) + run_match)
        rest = shape.norm(left) + shape.values(left) + shape.project(left) + shape.mlp_branch(left)
        # The paper multiplies the fused M x M map with the values; we attend over N x N, after one look at it.
        return Cost(
            paper=look + paper_match + shape.product(left, left) + rest,
            run=look + run_match + 2 * shape.product(tokens, tokens) + rest,
        )


@dataclass(frozen=True)
class Fusion:
    """Tokens after pooling (x: B M C, sizes: B M) and how they came about (weights: B N)."""

    x: Tensor
    sizes: Tensor
    weights: Tensor
    assignment: Assignment


def _largest_rows(full_map: Tensor, values: Tensor, assignment: Assignment) -> Tensor:
    """Max pooling's context: columns of the map summed, rows by maximum, times the fused values: B M (H d).

    full_map: B H N N; values: B H M d. The maximum does not commute with the product, so this one
    ablation does hold the map.
    """
    batch, heads, tokens, _ = full_map.shape
    columns = assignment.sum(full_map.permute(0, 3, 1, 2).flatten(2)).view(batch, -1, heads, tokens)  # B M H N
    rows = assignment.largest(columns.permute(0, 3, 2, 1).flatten(2)).view(batch, -1, heads, assignment.count)
    return (rows.transpose(1, 2).to(values.dtype) @ values).transpose(1, 2).flatten(2)
