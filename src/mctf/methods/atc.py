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

import torch
from torch import Tensor

from .. import kernels
from ..core.agglomeration import LINKAGES, agglomerate
from ..core.assignment import Assignment
from ..core.flops import BlockShape
from ..core.matching import unit_rows
from ..core.schedule import Amount, ReductionSpec, fast_blocks
from ..errors import MctfError, did_you_mean, shown
from .base import BlockContext, BlockOps, BlockOutput, Method, check_bool, run_unfused


@dataclass(frozen=True)
class ATC(Method):
    """r = 0.3, the default, leaves 0.7 of the unprotected tokens, then 0.7^2, then 0.7^3.

    linkage: distance between clusters, from the distances between their tokens: their "average", the smallest
        ("single") or the largest ("complete").
    proportional: add log(size) to the attention logits of merged keys.
    """

    linkage: str = "average"
    proportional: bool = True

    name: ClassVar[str] = "atc"
    summary: ClassVar[str] = "ATC (ECCV 2024): agglomerative clustering of keys, in three blocks"
    default_r: ClassVar[ReductionSpec] = 0.3

    def __post_init__(self) -> None:
        if not isinstance(self.linkage, str) or self.linkage not in LINKAGES:
            word = self.linkage if isinstance(self.linkage, str) else shown(self.linkage)
            raise MctfError(f"linkage={shown(self.linkage)} is unknown: {did_you_mean(word, LINKAGES)}")
        check_bool(proportional=self.proportional)

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

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """Attention on all N tokens, then clustering, then the MLP on the remaining M."""
        key_sizes = sizes if self.proportional else None
        if ctx.r == 0:
            return BlockOutput(run_unfused(block, x, key_sizes), sizes)
        h = block.norm1(x)
        q, k, v = block.queries_keys_values(h)
        context = block.attend(q, k, v, sizes=key_sizes)
        x = block.add_attention(x, block.finish_context(context, h))

        assignment = self._assign(k, ctx)
        weights = x.new_ones(x.shape[:2], dtype=torch.float32) if sizes is None else sizes
        x, sizes = kernels.merge(x, assignment, sizes=sizes, by_size=True)
        return BlockOutput(block.add_mlp(x), sizes, assignment, weights)

    @torch.no_grad()
    def _assign(self, k: Tensor, ctx: BlockContext) -> Assignment:
        unit = unit_rows(k.mean(dim=1)[:, ctx.protected :])
        roots = agglomerate(1 - unit @ unit.transpose(1, 2), ctx.r, self.linkage)
        return Assignment.of_roots(roots, roots.shape[1] - ctx.r, protected=ctx.protected)

    def run_macs(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> int:
        similarity = (tokens - protected) ** 2 * (shape.attention // shape.heads) if r else 0
        return shape.attention_branch(tokens) + similarity + shape.mlp_branch(tokens - r)
