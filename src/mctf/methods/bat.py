"""Density-peak clustering of tokens in its simple form: centres are dense and far from anything denser.

Axes: B images, N tokens, K clusters, C channels.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..core import matching
from ..core.assignment import Assignment
from ..core.flops import BlockShape, Cost, split_product
from ..core.matching import TINY, at_least_float32, rank_descending, unit_rows
from ..core.schedule import Amount, requested_tokens
from ..errors import MctfError
from .base import BlockContext, BlockOutput
from .evit import Attentive


@torch.no_grad()
def density_peaks(x: Tensor, clusters: int, *, neighbours: int) -> Tensor:
    """The cluster of each token, B N in 0 .. clusters - 1, from the strongest centre to the weakest.

    rho_i = exp(-mean of d_ij^2 over the nearest neighbours of i), delta_i = distance to the nearest token with a
    larger rho (or as large a one, and before i), or to the farthest of all for the densest. Centres are the largest
    rho * delta; every other token joins the nearest centre. d^2 is |x_i - x_j|^2 / C, so that the width of a model
    does not sharpen rho.
    """
    batch, tokens, _ = x.shape
    if clusters >= tokens:
        return torch.arange(tokens, device=x.device).expand(batch, -1)
    squared = _squared_distances(x)
    sparsity = _to_neighbours(squared, min(neighbours, tokens - 1))
    rank = rank_descending(-sparsity)
    denser = rank[:, None, :] < rank[:, :, None]
    to_denser = squared.masked_fill(~denser, float("inf")).amin(dim=2)
    delta = torch.where(rank == 0, squared.amax(dim=2), to_denser)
    peaks = delta.log() / 2 - sparsity  # log(delta * rho): rho itself may underflow
    centres = peaks.argsort(dim=1, descending=True, stable=True)[:, :clusters]
    joined = squared.gather(2, centres[:, None, :].expand(-1, tokens, -1)).argmin(dim=2)
    # a centre stays in its own cluster, even where another lies on top of it
    return joined.scatter(1, centres, torch.arange(clusters, device=x.device).expand(batch, -1))


def _squared_distances(x: Tensor) -> Tensor:
    """|x_i - x_j|^2 / C: B N N, at least 0."""
    x = at_least_float32(x)
    x = x - x.mean(dim=1, keepdim=True)  # what all tokens share would only cost digits
    squares = x.square().sum(dim=2)
    squared = squares[:, :, None] + squares[:, None, :] - 2 * (x @ x.transpose(1, 2))
    return squared.clamp_min(0) / x.shape[2]


def _to_neighbours(squared: Tensor, neighbours: int) -> Tensor:
    """Mean squared distance of each token to its nearest others: B N N -> B N."""
    itself = torch.eye(squared.shape[1], dtype=torch.bool, device=squared.device)
    return squared.masked_fill(itself, float("inf")).topk(neighbours, dim=2, largest=False).values.mean(dim=2)


# MERGED from mctf.methods.bat:
# BAT: beside attention, diversity: inattentive tokens are clustered, and similar ones among the attentive are fused.
#
# Long et al., "Beyond Attentive Tokens: Incorporating Token Importance and Diversity for Efficient Vision
# Transformers", CVPR 2023, whose abstract and figures say this much. After attention and its residual the class token's
# attention a ranks the tokens, as in EViT, and as many tokens remain as there. From the most attentive to the least:
#
#     untouched | lower attentive, of which the most similar pairs are fused | inattentive, clustered by density peaks
#
# A fused token is the mean of its tokens weighted by a.
#
# Choices of our own, as the details are not public: how the budget is split, see the options; pairs are found between
# every other of the lower attentive tokens, each pointing to the most similar (cosine) of the rest, so that two may
# share a partner; tokens are compared as they are between attention and MLP; protected tokens and the gradient of a as
# in EViT.
#
# Axes: B images, N tokens, n of them unprotected, M after the block, C channels.


@dataclass(frozen=True)
class Budget:
    """How many of a block's unprotected tokens meet which fate; `untouched + lower + inattentive` is their number."""

    untouched: int
    lower: int
    pairs: int
    inattentive: int
    clusters: int


@dataclass(frozen=True)
class BAT(Attentive):
    """r = 0.3, the default, leaves as many tokens as EViT with the keep rate 0.7.

    The first three are counts or, below 1, ratios, as r is; what does not fit into the budget is cut.

    clusters: of the remaining unprotected tokens, how many are clusters of inattentive ones; at least one is.
    pairs: how many of them are fused of lower attentive ones.
    lower: how many of the attentive tokens, from the least attentive on, may be paired; at least two for each pair.
    neighbours: how many nearest tokens decide how dense it is around a token.
    """

    clusters: Amount = 0.1
    pairs: Amount = 0.1
    lower: Amount = 0.5
    neighbours: int = 5

    name: ClassVar[str] = "bat"
    summary: ClassVar[str] = "BAT (CVPR 2023): EViT's budget, spent on clusters and fused pairs as well"

    def __post_init__(self) -> None:
        for option in ("clusters", "pairs", "lower"):
            value = getattr(self, option)
            counts = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if not counts and not (isinstance(value, float) and 0 <= value < 1):
                raise MctfError(
                    f"{option}={value!r} is neither a count of tokens nor a ratio in [0, 1): write 8 or 0.1"
                )
        if isinstance(self.neighbours, bool) or not isinstance(self.neighbours, int) or self.neighbours < 1:
            raise MctfError(f"neighbours={self.neighbours!r} must be a whole number, 1 or above")

    def budget(self, free: int, r: int) -> Budget:
        """The split of `free` unprotected tokens of which r leave."""
        remaining = free - r
        clusters = max(1, min(requested_tokens(self.clusters, remaining), remaining - 1))
        pairs = min(requested_tokens(self.pairs, remaining), r, remaining - clusters)
        attentive = remaining - clusters + pairs
        lower = max(2 * pairs, min(requested_tokens(self.lower, attentive), attentive)) if pairs else 0
        return Budget(attentive - lower, lower, pairs, free - attentive, clusters)

    def reduce(self, x: Tensor, a: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        assignment = self._assign(x, a, ctx)
        weights = a.clamp_min(TINY)
        x, sizes = kernels.fuse_tokens(x, weights, sizes, assignment, by_size=False)
        return BlockOutput(x, sizes, assignment, weights)

    @torch.no_grad()
    def _assign(self, x: Tensor, a: Tensor, ctx: BlockContext) -> Assignment:
        protected, left = ctx.protected, x.shape[1] - ctx.r
        budget = self.budget(x.shape[1] - protected, ctx.r)
        rank = matching.rank_descending(a[:, protected:])
        order = rank.argsort(dim=1)[..., None].expand(-1, -1, x.shape[2])
        ordered = x[:, protected:].gather(1, order)

        alone = protected + budget.untouched
        attentive = _fuse_pairs(ordered[:, budget.untouched :][:, : budget.lower], budget.pairs, alone)
        inattentive = ordered[:, budget.untouched + budget.lower :]
        clusters = density_peaks(inattentive, budget.clusters, neighbours=self.neighbours) + left - budget.clusters
        by_rank = torch.cat([attentive[:, protected:], clusters], dim=1)
        return Assignment(torch.cat([attentive[:, :protected], by_rank.gather(1, rank)], dim=1), left)

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        branches = super().cost(shape, tokens, r, protected=protected).paper
        if r == 0:
            return Cost(paper=branches, run=branches)
        budget = self.budget(tokens - protected, r)
        alike = split_product(budget.lower, shape.channels)
        clustered = budget.clusters < budget.inattentive
        distances = budget.inattentive**2 * shape.channels if clustered else 0
        # the published figure is EViT's: it leaves the comparisons of tokens out
        return Cost(paper=branches, run=branches + alike + distances)


def _fuse_pairs(lower: Tensor, pairs: int, alone: int) -> Tensor:
    """Slots of `alone` tokens that stay and of these lower attentive ones behind them: B alone+n."""
    batch, tokens, _ = lower.shape
    if pairs == 0:
        return torch.arange(alone + tokens, device=lower.device).expand(batch, -1)
    unit = unit_rows(lower)  # the matching splits by the parity of a token's place
    scores = unit[:, alone % 2 :: 2] @ unit[:, 1 - alone % 2 :: 2].transpose(1, 2)
    return matching.match_one_way(scores, pairs, protected=alone).slots
