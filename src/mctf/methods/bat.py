"""BAT: beside attention, diversity: inattentive tokens are clustered, and similar ones among the attentive are fused.

Long et al., "Beyond Attentive Tokens: Incorporating Token Importance and Diversity for Efficient Vision
Transformers", CVPR 2023, whose abstract and figures say this much. After attention and its residual the class token's
attention a ranks the tokens, as in EViT, and as many tokens remain as there. From the most attentive to the least:

    untouched | lower attentive, of which the most similar pairs are fused | inattentive, clustered by density peaks

A fused token is the mean of its tokens weighted by a.

Choices of our own, as the details are not public: how the budget is split, see the options; pairs are found between
every other of the lower attentive tokens, each pointing to the most similar (cosine) of the rest, so that two may
share a partner; tokens are compared as they are between attention and MLP; protected tokens and the gradient of a as
in EViT.

Axes: B images, N tokens, n of them unprotected, M after the block, C channels.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..core import matching
from ..core.assignment import Assignment
from ..core.clustering import density_peaks
from ..core.cost import BlockShape, Cost, split_product
from ..core.criteria import TINY, unit_rows
from ..core.schedule import Entry, tokens_asked
from ..errors import MctfError
from .attentive import Attentive
from .base import Step, Turn


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

    clusters: Entry = 0.1
    pairs: Entry = 0.1
    lower: Entry = 0.5
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
        clusters = max(1, min(tokens_asked(self.clusters, remaining), remaining - 1))
        pairs = min(tokens_asked(self.pairs, remaining), r, remaining - clusters)
        attentive = remaining - clusters + pairs
        lower = max(2 * pairs, min(tokens_asked(self.lower, attentive), attentive)) if pairs else 0
        return Budget(attentive - lower, lower, pairs, free - attentive, clusters)

    def reduce(self, x: Tensor, a: Tensor, sizes: Tensor | None, turn: Turn) -> Step:
        assignment = self._assign(x, a, turn)
        weights = a.clamp_min(TINY)
        x, sizes = kernels.fuse_tokens(x, weights, sizes, assignment, by_size=False)
        return Step(x, sizes, assignment, weights)

    @torch.no_grad()
    def _assign(self, x: Tensor, a: Tensor, turn: Turn) -> Assignment:
        protected, left = turn.protected, x.shape[1] - turn.r
        budget = self.budget(x.shape[1] - protected, turn.r)
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
