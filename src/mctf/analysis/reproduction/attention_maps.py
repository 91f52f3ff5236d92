"""The attention of fused tokens as the paper approximates it, beside the precise one (paper, appendix, Figure A).

Both are of the same fused tokens, those of MCTF as it runs. Approximated is what MCTF uses: the attention before
fusion, columns summed and rows averaged. Precise is computed anew from the fused tokens.

Axes: B images, H heads, N tokens entering a block, M leaving it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from ... import kernels
from ...api import fused_stack
from ...core.assignment import Assignment
from ...methods.base import BlockOps, Step, Turn
from ...methods.mctf import MCTF


@dataclass(frozen=True)
class Maps:
    """Both maps of one block, B H M M each; rows sum to 1."""

    approximated: Tensor
    precise: Tensor

    def distance(self) -> Tensor:
        """Share of the attention that goes elsewhere, in the mean over heads and rows: B, from 0 to 1."""
        return (self.approximated - self.precise).abs().sum(dim=3).mean(dim=(1, 2)) / 2


@dataclass(frozen=True)
class _Compared(MCTF):
    """MCTF that also works out both maps of every block that fuses; `seen` has them by block."""

    seen: dict[int, Maps] = field(default_factory=dict, hash=False, compare=False)

    name: ClassVar[str] = "mctf"

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, turn: Turn) -> Step:
        step = super().run(block, x, sizes, turn)
        if step.assignment is not None and step.weights is not None:
            self.seen[turn.index] = both_maps(block, x, sizes, step.assignment, step.weights)
        return step


@contextmanager
def compared(model: nn.Module) -> Iterator[dict[int, Maps]]:
    """While open, a model fused by "mctf" with its default options leaves both maps of each block here when it runs."""
    stack = fused_stack(model)
    own, watching = stack.method, _Compared()
    stack.method = watching
    try:
        yield watching.seen
    finally:
        stack.method = own


@torch.no_grad()
def both_maps(block: BlockOps, x: Tensor, sizes: Tensor | None, assignment: Assignment, weights: Tensor) -> Maps:
    """The maps of a block that is given x (B N C) with these sizes (B N) and fuses it so."""
    full = block.attention_map(*block.queries_keys(block.norm1(x)), sizes=sizes)
    counts = torch.ones_like(weights) if sizes is None else sizes
    fused = block.fused(assignment, weights)
    queries, keys = fused.queries_keys(fused.norm1(kernels.pool(x, weights, assignment)))
    return Maps(
        approximate(full, assignment, weights),
        fused.attention_map(queries, keys, sizes=assignment.total(counts)),
    )


def approximate(full: Tensor, assignment: Assignment, weights: Tensor) -> Tensor:
    """A_hat[p, u] = sum_{i in p} w_i (sum_{j in u} A_ij) / sum_{i in p} w_i: B H N N -> B H M M."""
    batch, heads, tokens, _ = full.shape
    columns = assignment.sum(full.permute(0, 3, 1, 2).flatten(2)).view(batch, -1, heads, tokens)  # B M H N
    rows = assignment.pool(columns.permute(0, 3, 2, 1).flatten(2), weights)  # B M (H M)
    return rows.view(batch, assignment.count, heads, assignment.count).transpose(1, 2)
