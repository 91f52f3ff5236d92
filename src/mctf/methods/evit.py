"""EViT: keep the tokens with the most class attention, and merge the rest to one.

Liang et al., "Not All Patches are What You Need: Expediting Vision Transformers via Token Reorganizations", ICLR 2022.
Between attention and MLP of a few blocks, a_j is the class token's attention to token j, averaged over heads. Of n
unprotected tokens the ceil(kappa n) with the largest a are kept, ordered by a; the others become sum_j a_j x_j, which
is not divided by sum_j a_j, at the end. That token is one of the n in the next such block. kappa is the keep rate:
1 - r for a ratio; a count is the number of tokens fewer after the block.

Choices where the paper is silent: distillation and register tokens stay in place like the class token; a_j has no
gradient; with a single inattentive token nothing would be saved, and the block runs unreduced.

Axes: B images, N tokens, n of them unprotected, M after the block, C channels.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from .. import kernels
from ..core.assignment import Assignment
from ..core.attention import TINY
from ..core.matching import rank_descending
from ..core.schedule import Amount, ReductionSpec, fast_blocks, requested_tokens
from .base import BlockContext, BlockOps, BlockOutput, Method, check_bool, check_class_token


class ClassAttentionMethod(Method):
    """Ranks tokens by the class token's attention and reduces them before the MLP: EViT and BAT.

    Both act at a quarter, half and three quarters of the depth (blocks 3, 6, 9 of twelve) and leave the same number of
    tokens: ceil(kappa n) and `added` merged ones.
    """

    default_r: ClassVar[ReductionSpec] = 0.3

    @property
    def added(self) -> int:
        """Number of merged tokens on top of the ceil(kappa n) of the keep rate."""
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
        """The requested number, as long as one attentive token remains."""
        requested = self.num_requested(amount, tokens, protected=protected, initial=initial, stage=stage)
        return max(0, min(requested, tokens - protected - 1 - self.added))

    def can_trim(self, *, reduces: bool) -> bool:
        return True

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """Attention on all N tokens, then the reduction, then the MLP on the remaining M."""
        if ctx.r == 0:
            return BlockOutput(block.plain(x), sizes)
        h = block.norm1(x)
        q, k, v = block.queries_keys_values(h)
        context, received = block.attend_with_received(q, k, v, sizes=None, rows="class")
        a = received.sum(dim=1)
        output = self.reduce(block.add_attention(x, block.finish_context(context, h)), a, sizes, ctx)
        return BlockOutput(block.add_mlp(output.x), output.sizes, output.assignment, output.weights, a)

    @abstractmethod
    def reduce(self, x: Tensor, a: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """Reduce tokens x (B N C) by the class token's attention a (B N, without gradient)."""


@dataclass(frozen=True)
class EViT(ClassAttentionMethod):
    """r = 0.3, the default, is the keep rate 0.7.

    fuse_inattentive: merge the inattentive tokens to one; otherwise they are dropped and map to the least attentive
        kept token with weight 0.
    """

    fuse_inattentive: bool = True

    name: ClassVar[str] = "evit"
    summary: ClassVar[str] = "EViT (ICLR 2022): keeps tokens with most class attention, merges the rest to one"

    def __post_init__(self) -> None:
        check_bool(fuse_inattentive=self.fuse_inattentive)

    @property
    def added(self) -> int:
        return int(self.fuse_inattentive)

    def reduce(self, x: Tensor, a: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        left = x.shape[1] - ctx.r
        first = torch.arange(ctx.protected, device=a.device).expand(a.shape[0], -1)
        rank = torch.cat([first, ctx.protected + rank_descending(a[:, ctx.protected :])], dim=1)
        # the last slot is that of the merged token, or of the least attentive kept one
        assignment = Assignment(rank.clamp_max(left - 1), left)
        if not self.fuse_inattentive:
            kept = rank.argsort(dim=1)[:, :left, None].expand(-1, -1, x.shape[2])
            return BlockOutput(x.gather(1, kept), None, assignment, (rank < left).float())
        weights = a.clamp_min(TINY)
        mass = weights.where(rank >= left - 1, 0).sum(dim=1)
        x, sizes = kernels.merge(x, assignment, weights=weights, sizes=sizes)
        merged = (x[:, -1] * mass[:, None]).to(x.dtype)  # pooling divides by the mass
        return BlockOutput(torch.cat([x[:, :-1], merged[:, None]], dim=1), sizes, assignment, weights)
