"""ATC: agglomerative clustering of tokens, in three blocks.

Haurum et al., "Agglomerative Token Clustering", ECCV 2024. Between attention and MLP of blocks 3, 6 and 9 of twelve,
unprotected tokens are clustered by the cosine distance of their keys, averaged over heads. Of n tokens at the start
floor(n rho^s) clusters remain after stage s, rho = 1 - r. A cluster becomes the mean of its tokens weighted by size,
and attention is proportional to size.

Choices where the paper is silent: in a clustering every token counts once, whatever its size; clusters are ordered by
their first token; distillation and register tokens stay in place like the class token.

Axes: B images, H heads, N tokens, n of them unprotected, M = N - r after the block, d channels per head.
"""

from dataclasses import dataclass
from math import floor
from typing import ClassVar

from torch import Tensor

from ..core.agglomeration import LINKAGES, agglomerate
from ..core.assignment import Assignment
from ..core.flops import BlockShape
from ..core.schedule import Amount, ReductionSpec, fast_blocks
from ..errors import MctfError, did_you_mean, shown
from .base import BlockContext
from .tome import KeyMergingMethod


@dataclass(frozen=True)
class ATC(KeyMergingMethod):
    """r = 0.3, the default, leaves 0.7 of the unprotected tokens, then 0.7^2, 0.7^3; `proportional` as in the base.

    linkage: distance between clusters, from the distances between their tokens: their "average", the smallest
        ("single") or the largest ("complete").
    """

    linkage: str = "average"

    name: ClassVar[str] = "atc"
    summary: ClassVar[str] = "ATC (ECCV 2024): agglomerative clustering of keys, in three blocks"
    default_r: ClassVar[ReductionSpec] = 0.3

    def __post_init__(self) -> None:
        if not isinstance(self.linkage, str) or self.linkage not in LINKAGES:
            word = self.linkage if isinstance(self.linkage, str) else shown(self.linkage)
            raise MctfError(f"linkage={shown(self.linkage)} is unknown: {did_you_mean(word, LINKAGES)}")
        super().__post_init__()

    def default_blocks(self, depth: int) -> tuple[int, ...]:
        return fast_blocks(depth)

    def num_requested(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        if isinstance(amount, int):
            return amount
        clusters = floor((initial - protected) * (1 - amount) ** (stage + 1) + 1e-9)
        return max(0, tokens - protected - clusters) if amount else 0

    def num_reduced(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """The requested number, as long as one cluster remains."""
        requested = self.num_requested(amount, tokens, protected=protected, initial=initial, stage=stage)
        return max(0, min(requested, tokens - protected - 1))

    def assign(self, keys: Tensor, ctx: BlockContext) -> Assignment:
        keys = keys[:, ctx.protected :]
        roots = agglomerate(1 - keys @ keys.transpose(1, 2), ctx.r, self.linkage)
        return Assignment.of_roots(roots, roots.shape[1] - ctx.r, protected=ctx.protected)

    def run_macs(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> int:
        similarity = (tokens - protected) ** 2 * (shape.attention // shape.heads) if r else 0
        return shape.attention_branch(tokens) + similarity + shape.mlp_branch(tokens - r)
