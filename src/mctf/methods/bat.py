"""BAT: attention and diversity: inattentive tokens are clustered, similar attentive ones are merged in pairs.

Long et al., "Beyond Attentive Tokens: Incorporating Token Importance and Diversity for Efficient Vision
Transformers", CVPR 2023; its abstract and figures give this much. Between attention and MLP the class token's attention
a ranks the tokens as in EViT, and as many tokens remain. From the most attentive to the least:

    untouched | lower attentive, of which the most similar pairs are merged | inattentive, clustered by density peaks

A merged token is the mean of its tokens weighted by a.

Choices of our own where details are not public: the split of the budget, see the options; pairs are taken between
alternate lower attentive tokens, each with the most similar (cosine) one of the other half, so that two may share a
partner; tokens are compared as they are between attention and MLP; protected tokens and the gradient of a as in EViT.

Axes: B images, N tokens, n of them unprotected, M after the block, K clusters, C channels.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..core.assignment import Assignment
from ..core.attention import TINY, at_least_float32
from ..core.flops import BlockShape
from ..core.matching import match_one_way, rank_descending, unit_rows
from ..core.schedule import Amount, requested_tokens
from ..errors import MctfError, shown
from .base import BlockContext, BlockOutput, check_whole
from .evit import ClassAttentionMethod


@dataclass(frozen=True)
class Budget:
    """The split of a block's unprotected tokens; `untouched + lower + inattentive` is their number."""

    untouched: int
    lower: int
    pairs: int
    inattentive: int
    clusters: int


@dataclass(frozen=True)
class BAT(ClassAttentionMethod):
    """r = 0.3, the default, leaves as many tokens as EViT with the keep rate 0.7.

    The first three options are counts or, below 1, ratios, like r; what exceeds the budget is cut.

    clusters: of the remaining unprotected tokens, the number of clusters of inattentive ones; at least one.
    pairs: of the remaining unprotected tokens, the number of merged pairs of lower attentive ones.
    lower: number of attentive tokens, from the least attentive on, that may be paired; at least two per pair.
    neighbours: number of nearest tokens that define the density around a token.
    """

    clusters: Amount = 0.1
    pairs: Amount = 0.1
    lower: Amount = 0.5
    neighbours: int = 5

    name: ClassVar[str] = "bat"
    summary: ClassVar[str] = "BAT (CVPR 2023): EViT's budget, spent on clusters and merged pairs as well"

    def __post_init__(self) -> None:
        for option in ("clusters", "pairs", "lower"):
            value = getattr(self, option)
            is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
            if not is_count and not (isinstance(value, float) and 0 <= value < 1):
                raise MctfError(
                    f"{option}={shown(value)} is neither a count of tokens nor a ratio in [0, 1): write 8 or 0.1"
                )
        check_whole(1, neighbours=self.neighbours)

    def budget(self, unprotected: int, r: int) -> Budget:
        """The split of so many unprotected tokens of which r are removed."""
        num_remaining = unprotected - r
        clusters = max(1, min(requested_tokens(self.clusters, num_remaining), num_remaining - 1))
        pairs = min(requested_tokens(self.pairs, num_remaining), r, num_remaining - clusters)
        attentive = num_remaining - clusters + pairs
        lower = max(2 * pairs, min(requested_tokens(self.lower, attentive), attentive)) if pairs else 0
        return Budget(attentive - lower, lower, pairs, unprotected - attentive, clusters)

    def reduce(self, x: Tensor, a: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        assignment = self._assign(x, a, ctx)
        weights = a.clamp_min(TINY)
        x, sizes = kernels.merge(x, assignment, weights=weights, sizes=sizes)
        return BlockOutput(x, sizes, assignment, weights)

    @torch.no_grad()
    def _assign(self, x: Tensor, a: Tensor, ctx: BlockContext) -> Assignment:
        protected, left = ctx.protected, x.shape[1] - ctx.r
        budget = self.budget(x.shape[1] - protected, ctx.r)
        rank = rank_descending(a[:, protected:])
        order = rank.argsort(dim=1)[..., None].expand(-1, -1, x.shape[2])
        ordered = x[:, protected:].gather(1, order)

        untouched, attentive = budget.untouched, budget.untouched + budget.lower
        pairs = _merge_pairs(ordered[:, untouched:attentive], budget.pairs, protected + untouched)
        clusters = density_peaks(ordered[:, attentive:], budget.clusters, neighbours=self.neighbours)
        by_rank = torch.cat([pairs[:, protected:], clusters + left - budget.clusters], dim=1)
        return Assignment(torch.cat([pairs[:, :protected], by_rank.gather(1, rank)], dim=1), left)

    def paper_macs(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> int:
        """The published figure is EViT's: it leaves out the comparisons of tokens."""
        return shape.attention_branch(tokens) + shape.mlp_branch(tokens - r)


def _merge_pairs(lower: Tensor, pairs: int, kept: int) -> Tensor:
    """Slots of `kept` tokens that stay alone and of the lower attentive ones behind them: B kept+n."""
    batch, tokens, _ = lower.shape
    if pairs == 0:
        return torch.arange(kept + tokens, device=lower.device).expand(batch, -1)
    unit = unit_rows(lower)  # matching splits by the parity of a token's position
    scores = unit[:, kept % 2 :: 2] @ unit[:, 1 - kept % 2 :: 2].transpose(1, 2)
    return match_one_way(scores, pairs, protected=kept).slots


@torch.no_grad()
def density_peaks(x: Tensor, clusters: int, *, neighbours: int) -> Tensor:
    """Density-peak clustering: the cluster of each token, B N in 0 .. K - 1, from the strongest center to the weakest.

    rho_i = exp(-mean of d_ij^2 over the nearest neighbours of i); delta_i = distance to the nearest token of larger rho
    (equal ones by index), or to the farthest of all for the densest. Centers have the largest rho * delta; every other
    token joins the nearest center. d^2 is |x_i - x_j|^2 / C, so that the width of a model does not sharpen rho.
    """
    batch, tokens, channels = x.shape
    if clusters >= tokens:
        return torch.arange(tokens, device=x.device).expand(batch, -1)
    x = at_least_float32(x)
    x = x - x.mean(dim=1, keepdim=True)  # a common offset would only cost digits
    squares = x.square().sum(dim=2)
    squared = (squares[:, :, None] + squares[:, None, :] - 2 * (x @ x.transpose(1, 2))).clamp_min(0) / channels

    itself = torch.eye(tokens, dtype=torch.bool, device=x.device)
    nearest = squared.masked_fill(itself, float("inf")).topk(min(neighbours, tokens - 1), dim=2, largest=False).values
    sparsity = nearest.mean(dim=2)  # -log rho
    rank = rank_descending(-sparsity)
    denser = rank[:, None, :] < rank[:, :, None]
    to_denser = squared.masked_fill(~denser, float("inf")).amin(dim=2)
    delta = torch.where(rank == 0, squared.amax(dim=2), to_denser)
    peaks = delta.log() / 2 - sparsity  # log(delta * rho): rho itself may underflow
    centers = peaks.argsort(dim=1, descending=True, stable=True)[:, :clusters]
    cluster = squared.gather(2, centers[:, None, :].expand(-1, tokens, -1)).argmin(dim=2)
    # a center stays in its own cluster, even where another coincides with it
    return cluster.scatter(1, centers, torch.arange(clusters, device=x.device).expand(batch, -1))
