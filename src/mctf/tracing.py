"""Tracing a fused model: which tokens were merged and which were dropped, per block.

Axes: B images, N tokens of the input, N_l tokens entering block l, M_l after it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor, nn

from .api import fused_stack
from .core.assignment import Assignment
from .errors import MctfError, shown
from .methods.base import BlockOutput


@dataclass(frozen=True)
class BlockTrace:
    """The record of one block.

    assignment: B N_l -> M_l; the identity where nothing was reduced.
    sizes: B M_l, number of input tokens per token after the block.
    informativeness: B N_l, None where the method does not compute it.
    dropped: B N_l, bool, tokens of weight 0 in their slot; padding is among them.
    """

    assignment: Assignment
    sizes: Tensor
    informativeness: Tensor | None
    dropped: Tensor

    @property
    def tokens(self) -> int:
        return self.assignment.count


class Trace:
    """The last forward pass, in `blocks`, one BlockTrace per block."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._blocks: dict[int, BlockTrace] = {}
        self._other_threads = False  # whether the model ran in any

    def __repr__(self) -> str:
        return f"Trace(token_counts={self.token_counts if self._blocks else []})"

    @property
    def blocks(self) -> list[BlockTrace]:
        if not self._blocks and self._other_threads:
            raise MctfError(
                "the model ran in another thread than `mctf.trace`, which records its own thread alone: open the trace "
                "in the thread that runs the model"
            )
        if not self._blocks:
            raise MctfError("nothing was traced yet: run the fused model inside `with mctf.trace(model) as trace:`")
        return [self._blocks[index] for index in sorted(self._blocks)]

    @property
    def token_counts(self) -> list[int]:
        """Tokens after each block."""
        return [block.tokens for block in self.blocks]

    def source_map(self, block: int = -1) -> Tensor:
        """The slot of each input token after the given block (default: the last): B N, int64.

        A dropped token has the slot of a kept one; `dropped` tells which these are.
        """
        return self._composed(block).slots

    def dropped(self, block: int = -1) -> Tensor:
        """Which input tokens are in no token after the given block (default: the last): B N, bool.

        They were dropped up to there, alone or with a token they had been merged into. Patches that a mask hides in
        training do not count as dropped.
        """
        first, *later = self._until(block)
        result, source = first.dropped, first.assignment
        for each in later:
            result = result | source.unpool(each.dropped)
            source = source.compose(each.assignment)
        return result

    def unpool(self, features: Tensor, block: int = -1) -> Tensor:
        """One feature per input token, from one per token after the given block: B M … -> B N …."""
        composed = self._composed(block)
        if not isinstance(features, Tensor):
            raise MctfError(f"features must be a tensor, images x tokens x …, not {shown(features)}")
        if features.shape[:2] != (composed.slots.shape[0], composed.count):
            expected = (composed.slots.shape[0], composed.count)
            raise MctfError(f"features must start with {expected} (images, tokens), not {tuple(features.shape[:2])}")
        return composed.unpool(features)

    def _composed(self, block: int) -> Assignment:
        first, *later = self._until(block)
        result = first.assignment
        for each in later:
            result = result.compose(each.assignment)
        return result

    def _until(self, block: int) -> list[BlockTrace]:
        """All blocks up to the given one."""
        blocks = self.blocks
        number = isinstance(block, Integral) and not isinstance(block, bool)
        if not number or not -len(blocks) <= block < len(blocks):
            raise MctfError(f"block {shown(block)} was not traced: there are blocks 0 to {len(blocks) - 1}")
        return blocks[: int(block) % len(blocks) + 1]

    @torch.compiler.disable
    def record(self, index: int, x: Tensor, output: BlockOutput) -> None:
        """Called by the stack after each block; passes of other threads are ignored."""
        if threading.get_ident() != self._thread:
            self._other_threads = True
            return
        if index == 0:
            self._blocks.clear()
        batch, tokens = x.shape[:2]
        identity = Assignment(torch.arange(tokens, device=x.device).expand(batch, -1), tokens)
        sizes = torch.ones(output.x.shape[:2], device=x.device) if output.sizes is None else output.sizes
        weights = torch.ones(batch, tokens, device=x.device) if output.weights is None else output.weights
        self._blocks[index] = BlockTrace(output.assignment or identity, sizes, output.informativeness, weights == 0)


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record what the fused model does: `with mctf.trace(model) as trace: model(images)`."""
    result = Trace()
    with fused_stack(model).observed_by(result):
        yield result
