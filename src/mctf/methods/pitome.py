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

from .. import kernels
from ..core.assignment import Assignment
from ..core.flops import BlockShape
from ..core.matching import rank_descending, unit_rows
from ..core.schedule import ReductionSpec
from .base import BlockContext, BlockOps, BlockOutput, Method, check_bool, check_number, run_unfused


@dataclass(frozen=True)
class PiToMe(Method):
    """r = 0.1, the default, keeps 0.9 of the unprotected tokens of every block.

    margin: cosine from which on tokens count as alike, in the first block; it falls to 0 over the depth.
    proportional: add log(size) to the attention logits of merged keys.
    """

    margin: float = 0.75
    proportional: bool = True

    name: ClassVar[str] = "pitome"
    summary: ClassVar[str] = "PiToMe (NeurIPS 2024): merges keys that resemble many others, protects the rest"
    default_r: ClassVar[ReductionSpec] = 0.1

    def __post_init__(self) -> None:
        check_number(1, margin=self.margin)
        check_bool(proportional=self.proportional)

    def default_blocks(self, depth: int) -> range:
        return range(depth)

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """Attention on all N tokens, then merging, then the MLP on the remaining M."""
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
        cosines = unit @ unit.transpose(1, 2)  # B n n
        energy = F.elu(cosines - self.margin * (1 - ctx.index / ctx.depth)).mean(dim=2)
        ranked = energy.argsort(dim=1, descending=True, stable=True)
        if 2 * ctx.index >= ctx.depth:
            ranked = ranked[:, : 2 * ctx.r]
        first, second = ranked[:, ::2], ranked[:, 1::2]
        tokens = cosines.shape[1]
        scores = cosines.gather(1, first[:, :, None].expand(-1, -1, tokens))
        scores = scores.gather(2, second[:, None, :].expand(-1, first.shape[1], -1))
        best, match = scores.max(dim=2)
        joined = torch.where(rank_descending(best) < ctx.r, second.gather(1, match), first)
        roots = torch.arange(tokens, device=k.device).expand(k.shape[0], -1).scatter(1, first, joined)
        return Assignment.of_roots(roots, tokens - ctx.r, protected=ctx.protected)

    def run_macs(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> int:
        similarity = (tokens - protected) ** 2 * (shape.attention // shape.heads) if r else 0
        return shape.attention_branch(tokens) + similarity + shape.mlp_branch(tokens - r)
