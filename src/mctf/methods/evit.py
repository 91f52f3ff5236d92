"""What EViT and BAT have in common: at a few blocks the class token's attention ranks the tokens, and some become one.

Both act between attention and MLP, at a quarter, half and three quarters of the depth (blocks 3, 6, 9 of twelve), and
bring N tokens to the same number: of the n unprotected ones ceil(kappa n) + 1 remain, kappa being the keep rate. In
terms of r, kappa = 1 - r for a ratio; a count is the number of tokens fewer after the block.

Axes: B images, N tokens, n of them unprotected, C channels.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from .. import kernels
from ..core.assignment import Assignment
from ..core.flops import BlockShape, Cost
from ..core.matching import TINY, rank_descending
from ..core.schedule import Amount, ReductionSpec, fast_blocks, requested_tokens
from .base import BlockContext, BlockOps, BlockOutput, Method, check_bool, check_class_token


class Attentive(Method):
    """A method that reads the class token's row of the attention and reduces by it before the MLP."""

    default_r: ClassVar[ReductionSpec] = 0.3

    @property
    def added(self) -> int:
        """Tokens made of the inattentive ones that come on top of the ceil(kappa n) of the keep rate."""
        return 1

    def resolve(self, *, class_token: bool) -> Self:
        check_class_token(self.name, class_token)
        return self

    def default_blocks(self, depth: int) -> tuple[int, ...]:
        return fast_blocks(depth)

    def num_requested(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        inattentive = requested_tokens(amount, tokens - protected)  # n - ceil(kappa n) for a ratio
        return inattentive if isinstance(amount, int) else max(0, inattentive - self.added)

    def num_reduced(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """What is asked, as long as one attentive token remains."""
        asked = self.num_requested(amount, tokens, protected=protected, initial=initial, stage=stage)
        return max(0, min(asked, tokens - protected - 1 - self.added))

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """Plain attention on all N tokens, then the reduction, then the MLP on what remains."""
        if ctx.r == 0:
            return BlockOutput(block.plain(x), sizes)
        h = block.norm1(x)
        q, k, v = block.queries_keys_values(h)
        context, received = block.attend_with_received(q, k, v, sizes=None, rows="class")
        a = received.sum(dim=1)
        step = self.reduce(block.add_attention(x, block.finish_context(context, h)), a, sizes, ctx)
        return BlockOutput(block.add_mlp(step.x), step.sizes, step.assignment, step.weights, a)

    @abstractmethod
    def reduce(self, x: Tensor, a: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """Which tokens of x (B N C) become one, by the class token's attention a (B N, without gradient)."""

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        cost = shape.attention_branch(tokens) + shape.mlp_branch(tokens - r)
        return Cost(paper=cost, run=cost)


# MERGED from mctf.methods.evit:
# EViT: keep the tokens the class token attends to, and fuse the rest to one.
#
# Liang et al., "Not All Patches are What You Need: Expediting Vision Transformers via Token Reorganizations", ICLR 2022.
# After attention and its residual, a_j is the class token's attention to token j, averaged over heads. Of n unprotected
# tokens the ceil(kappa n) with the largest a stay, ordered by a; the others become sum_j a_j x_j, which is not divided
# by sum_j a_j, at the end. That token is one of the n in the next such block.
#
# Choices where the paper is silent: distillation and register tokens stay in place like the class token; a_j has no
# gradient; with a single inattentive token nothing would be saved, and the block runs as it is.
#
# Axes: B images, N tokens, M after the block, C channels.


@dataclass(frozen=True)
class EViT(Attentive):
    """r = 0.3, the default, is the keep rate 0.7.

    fuse_inattentive: make one token of those that leave; otherwise they are dropped. To have a place at all, a
        dropped token is mapped to the least attentive one that stays, where it counts for nothing.
    """

    fuse_inattentive: bool = True

    name: ClassVar[str] = "evit"
    summary: ClassVar[str] = "EViT (ICLR 2022): keeps what the class token attends to, fuses the rest to one token"

    def __post_init__(self) -> None:
        check_bool(fuse_inattentive=self.fuse_inattentive)

    @property
    def added(self) -> int:
        return int(self.fuse_inattentive)

    def reduce(self, x: Tensor, a: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        left = x.shape[1] - ctx.r
        place = _places_by_rank(a, ctx.protected)
        # the last place is that of the fused token, or of the least attentive one that stays
        assignment = Assignment(place.clamp_max(left - 1), left)
        if not self.fuse_inattentive:
            kept = place.argsort(dim=1)[:, :left, None].expand(-1, -1, x.shape[2])
            return BlockOutput(x.gather(1, kept), None, assignment, (place < left).float())
        weights = a.clamp_min(TINY)
        mass = weights.where(place >= left - 1, 0).sum(dim=1)
        x, sizes = kernels.fuse_tokens(x, weights, sizes, assignment, by_size=False)
        fused = (x[:, -1] * mass[:, None]).to(x.dtype)  # pooling divides by the mass
        return BlockOutput(torch.cat([x[:, :-1], fused[:, None]], dim=1), sizes, assignment, weights)


def _places_by_rank(a: Tensor, protected: int) -> Tensor:
    """Place of each token when the unprotected ones are sorted by falling a: B N."""
    first = torch.arange(protected, device=a.device).expand(a.shape[0], -1)
    return torch.cat([first, protected + rank_descending(a[:, protected:])], dim=1)
