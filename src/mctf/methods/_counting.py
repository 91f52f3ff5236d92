"""Multiply-adds of a method's block, counted by running it on the meta device.

Pieces of the block are counted by the formulas of `core.flops.BlockShape`, what the method itself multiplies (pair
scores, learned layers) by torch's FlopCounterMode, LayerNorms of learned layers by their elements. Conventions are
fvcore's: one FLOP per multiply-add, 5 per element of a LayerNorm, 0 for softmax, activations and additions.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..core.assignment import Assignment
from ..core.attention import ReceivedAttention
from ..core.flops import NORM, BlockShape
from .base import BlockContext, Method


@lru_cache(maxsize=4096)
def count_macs(method: Method, shape: BlockShape, tokens: int, r: int, protected: int) -> int:
    """Multiply-adds of one block of this shape that removes r of its tokens; the block's own where r is 0."""
    if r == 0:
        return shape.plain(tokens)
    block = CountingOps(shape)
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        layers = method.make_layers([shape], [r])
        if layers is not None:
            layers.eval()
            for part in layers.modules():
                if isinstance(part, nn.LayerNorm):
                    part.register_forward_hook(block.count_norm)
        ctx = BlockContext(r=r, protected=protected, layers=None if layers is None else layers["0"], amount=r)
        method.run(block, torch.empty(1, tokens, shape.channels), None, ctx)
    return block.macs + counter.get_total_flops() // 2


class CountingOps:
    """A block without weights: every piece returns a meta tensor of the right shape and adds its cost to `macs`."""

    def __init__(self, shape: BlockShape) -> None:
        self.shape = shape
        self.macs = 0

    def count_norm(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Forward hook of a LayerNorm."""
        self.macs += NORM * output.numel()

    def _heads(self, x: Tensor) -> Tensor:
        return x.new_empty(len(x), self.shape.heads, x.shape[1], self.shape.attention // self.shape.heads)

    def plain(self, x: Tensor) -> Tensor:
        self.macs += self.shape.plain(x.shape[1])
        return x

    def norm1(self, x: Tensor) -> Tensor:
        self.macs += self.shape.norm(x.shape[1])
        return x

    def queries_keys(self, h: Tensor) -> tuple[Tensor, Tensor]:
        self.macs += self.shape.queries_keys(h.shape[1])
        return self._heads(h), self._heads(h)

    def values(self, h: Tensor) -> Tensor:
        self.macs += self.shape.values(h.shape[1])
        return h.new_empty(*h.shape[:2], self.shape.attention)

    def queries_keys_values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (*self.queries_keys(h), self.split_heads(self.values(h)))

    def first_queries(self, h: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.queries_keys_values(h)
        return q[:, :, :count], k, v

    def split_heads(self, flat: Tensor) -> Tensor:
        return self._heads(flat)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sizes: Tensor | None,
        unpool: Assignment | None = None,
        received: ReceivedAttention | None = None,
    ) -> Tensor:
        rows, keys = q.shape[2], k.shape[2]
        self.macs += self.shape.map(rows, keys) + self.shape.product(rows, keys)
        return q.new_empty(len(q), rows, self.shape.attention)

    def attention_received(
        self, q: Tensor, k: Tensor, *, sizes: Tensor | None, rows: str, keep: bool = False
    ) -> ReceivedAttention:
        self.macs += self.shape.map(1 if rows == "class" else q.shape[2], k.shape[2])
        return ReceivedAttention(q.new_empty(len(q), 1, k.shape[2]))

    def attend_with_received(
        self, q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, rows: str
    ) -> tuple[Tensor, Tensor]:
        return self.attend(q, k, v, sizes=sizes), q.new_empty(len(q), 1, k.shape[2])

    def attention_map(self, q: Tensor, k: Tensor, *, sizes: Tensor | None) -> Tensor:
        self.macs += self.shape.map(q.shape[2], k.shape[2])
        return q.new_empty(*q.shape[:3], k.shape[2])

    def finish_context(self, context: Tensor, h: Tensor) -> Tensor:
        self.macs += self.shape.finish_context(context.shape[1])
        return context

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        self.macs += self.shape.project(x.shape[1])
        return x

    def add_mlp(self, x: Tensor) -> Tensor:
        self.macs += self.shape.mlp_branch(x.shape[1])
        return x

    def fused(self, assignment: Assignment, weights: Tensor) -> "CountingOps":
        return self
