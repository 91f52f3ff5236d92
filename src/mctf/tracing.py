"""Watching a fused model: which tokens became one and which were dropped, block by block.

Axes: B images, N tokens of the input, N_l tokens entering block l, M_l leaving it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .api import fused_stack
from .core.assignment import Assignment
from .errors import MctfError
from .methods.base import BlockOutput


@dataclass(frozen=True)
class BlockTrace:
    """What one block did.

    assignment: B N_l -> M_l; the identity where nothing was fused.
    sizes: B M_l, how many input tokens each token stands for after the block.
    informativeness: B N_l, None where the method does not use it.
    dropped: B N_l, bool, the tokens that counted for nothing in their slot; padding is among them.
    """

    assignment: Assignment
    sizes: Tensor
    informativeness: Tensor | None
    dropped: Tensor

    @property
    def tokens(self) -> int:
        return self.assignment.count


class Trace:
    """The last forward pass seen, in `blocks`, one BlockTrace a block."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._blocks: dict[int, BlockTrace] = {}

    def __repr__(self) -> str:
        return f"Trace(token_counts={self.token_counts if self._blocks else []})"

    @property
    def blocks(self) -> list[BlockTrace]:
        if not self._blocks:
            raise MctfError("nothing was traced yet: run the fused model inside `with mctf.trace(model) as trace:`")
        return [self._blocks[index] for index in sorted(self._blocks)]

    @property
    def token_counts(self) -> list[int]:
        """Tokens leaving each block."""
        return [block.tokens for block in self.blocks]

    def source_map(self, block: int = -1) -> Tensor:
        """For each input token its slot after the given block (default: the last): B N, int64.

        A token that was dropped has the slot of one that stays, to have a place at all: see `dropped`.
        """
        return self._composed(block).slots

    def dropped(self, block: int = -1) -> Tensor:
        """Which input tokens are in no token after the given block (default: the last): B N, bool.

        They were dropped up to there, by themselves or with a token they had been fused into. In training, patches
        that only hide behind a mask are still there.
        """
        first, *later = self._until(block)
        result, source = first.dropped, first.assignment
        for each in later:
            result = result | source.unpool(each.dropped)
            source = source.compose(each.assignment)
        return result

    def unpool(self, features: Tensor, block: int = -1) -> Tensor:
        """One feature per input token again, from one per token after the given block: B M … -> B N …."""
        composed = self._composed(block)
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
        if not -len(blocks) <= block < len(blocks):
            raise MctfError(f"block {block} was not traced: there are blocks 0 to {len(blocks) - 1}")
        return blocks[: block % len(blocks) + 1]

    @torch.compiler.disable
    def record(self, index: int, x: Tensor, step: BlockOutput) -> None:
        """Called by the stack after each block; other threads' passes are none of ours."""
        if threading.get_ident() != self._thread:
            return
        if index == 0:
            self._blocks.clear()
        batch, tokens = x.shape[:2]
        identity = Assignment(torch.arange(tokens, device=x.device).expand(batch, -1), tokens)
        sizes = torch.ones(step.x.shape[:2], device=x.device) if step.sizes is None else step.sizes
        counts = torch.ones(batch, tokens, device=x.device) if step.weights is None else step.weights
        self._blocks[index] = BlockTrace(step.assignment or identity, sizes, step.informativeness, counts == 0)


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record what the fused model does: `with mctf.trace(model) as trace: model(images)`."""
    observer = Trace()
    with fused_stack(model).observed_by(observer):
        yield observer
