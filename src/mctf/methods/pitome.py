"""PiToMe: tokens of high energy, those that resemble many others, are merged; tokens of low energy are protected.

Tran et al., "Accelerating Transformers with Spectrum-Preserving Token Merging", NeurIPS 2024. Between attention and MLP
of every block, with cosines of keys averaged over heads, the energy of token i is

    E_i = mean_j f(cos(i, j) - margin),    f(x) = x above 0, exp(x) - 1 below;    margin = 0.75 - 0.75 l / L

in block l of L. Tokens are sorted by falling energy. In the first half of the blocks, the sorted tokens alternate
between two sides, and the r tokens of the first side with the best match join it. In the second half only the first 2r
tokens of the list take part: all r of the first side join their best match. Means are weighted by size, and attention
is proportional to it.

Choice where the paper is silent: distillation and register tokens stay in place like the class token.

Axes: B images, H heads, N tokens, n of them unprotected, M = N - r after the block, d channels per head.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.assignment import Assignment
from ..core.flops import BlockShape
from ..core.matching import order_descending, rank_descending
from ..core.schedule import ReductionSpec
from .base import BlockContext, check_number
from .tome import KeyMergingMethod


@dataclass(frozen=True)
class PiToMe(KeyMergingMethod):
    """r = 0.1, the default, keeps 0.9 of the unprotected tokens of every block; `proportional` as in the base.

    margin: cosine from which on tokens count as alike, in the first block; it falls to 0 over the depth.
    """

    margin: float = 0.75

    name: ClassVar[str] = "pitome"
    summary: ClassVar[str] = "PiToMe (NeurIPS 2024): merges keys that resemble many others, protects the rest"
    default_r: ClassVar[ReductionSpec] = 0.1

    def __post_init__(self) -> None:
        check_number(1, margin=self.margin)
        super().__post_init__()

    def default_blocks(self, depth: int) -> range:
        return range(depth)

    def assign(self, keys: Tensor, ctx: BlockContext) -> Assignment:
        keys = keys[:, ctx.protected :]
        cosines = keys @ keys.transpose(1, 2)  # B n n
        energy = F.elu(cosines - self.margin * (1 - ctx.index / ctx.depth)).mean(dim=2)
        ranked = order_descending(energy)
        if 2 * ctx.index >= ctx.depth:
            ranked = ranked[:, : 2 * ctx.r]
        first, second = ranked[:, ::2], ranked[:, 1::2]
        batch, tokens, _ = cosines.shape
        scores = cosines.gather(1, first[:, :, None].expand(-1, -1, tokens))
        scores = scores.gather(2, second[:, None, :].expand(-1, first.shape[1], -1))
        best, match = scores.max(dim=2)
        joined = torch.where(rank_descending(best) < ctx.r, second.gather(1, match), first)
        roots = torch.arange(tokens, device=keys.device).expand(batch, -1).scatter(1, first, joined)
        return Assignment.of_roots(roots, tokens - ctx.r, protected=ctx.protected)

    def run_macs(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> int:
        similarity = (tokens - protected) ** 2 * (shape.attention // shape.heads) if r else 0
        return shape.attention_branch(tokens) + similarity + shape.mlp_branch(tokens - r)
