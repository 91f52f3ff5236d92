"""ToMe: merge similar tokens between attention and MLP, in every block.

Bolya et al., "Token Merging: Your ViT But Faster", ICLR 2023, as the paper compares with it.

Axes: B images, H heads, N tokens, M = N - r tokens after merging, d channels per head.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..core import matching
from ..core.assignment import Assignment
from ..core.flops import BlockShape, split_product
from .base import BlockContext, BlockOps, BlockOutput, Method, check_bool, run_unfused


@dataclass(frozen=True)
class KeyMergingMethod(Method):
    """Merges tokens by their keys, averaged over heads, between attention and MLP: ToMe, PiToMe and ATC.

    A merged token is the mean of its parts weighted by size.

    proportional: add log(size) to the attention logits of merged keys.
    """

    proportional: bool = True

    def __post_init__(self) -> None:
        check_bool(proportional=self.proportional)

    def can_trim(self, *, reduces: bool) -> bool:
        return True

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """Attention on all N tokens, then merging, then the MLP on the remaining M."""
        key_sizes = self.key_sizes(sizes)
        if ctx.r == 0:
            return BlockOutput(run_unfused(block, x, key_sizes), sizes)
        h = block.norm1(x)
        q, k, v = block.queries_keys_values(h)
        context = block.attend(q, k, v, sizes=key_sizes)
        x = block.add_attention(x, block.finish_context(context, h))

        with torch.no_grad():
            assignment = self.assign(matching.unit_rows(k.mean(dim=1)), ctx)
        weights = x.new_ones(x.shape[:2], dtype=torch.float32) if sizes is None else sizes
        x, sizes = kernels.merge(x, assignment, sizes=sizes, by_size=True)
        return BlockOutput(block.add_mlp(x), sizes, assignment, weights)

    @abstractmethod
    def assign(self, keys: Tensor, ctx: BlockContext) -> Assignment:
        """The assignment of N tokens to N - ctx.r slots by their mean keys, of length 1: B N d."""


@dataclass(frozen=True)
class ToMe(KeyMergingMethod):
    """The r best pairs of alternate tokens are merged, by the cosine of their keys; `proportional` as in the base."""

    name: ClassVar[str] = "tome"
    summary: ClassVar[str] = "Token Merging (ICLR 2023): one-way matching of keys, between attention and MLP"

    def default_blocks(self, depth: int) -> range:
        return range(depth)

    def assign(self, keys: Tensor, ctx: BlockContext) -> Assignment:
        sources, targets = matching.alpha(keys, ctx.protected), matching.beta(keys, ctx.protected)
        return matching.match_one_way(sources @ targets.transpose(1, 2), ctx.r, protected=ctx.protected)

    def paper_macs(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> int:
        similarity = split_product(tokens, shape.attention // shape.heads) if r else 0
        return shape.attention_branch(tokens) + similarity + shape.mlp_branch(tokens - r)

    def run_macs(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> int:
        similarity = split_product(tokens - protected, shape.attention // shape.heads) if r else 0
        return shape.attention_branch(tokens) + similarity + shape.mlp_branch(tokens - r)
