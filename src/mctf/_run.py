"""The state of one pass through a fused stack: what the blocks hand on, and the runs of several sequences in a batch.

Axes: B images, N tokens entering the stack, M tokens at some block, C channels, P padding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .core.positions import TokenPositions, positions_after
from .core.schedule import Amount
from .core.sequences import Sequences
from .errors import MctfError
from .methods.base import BlockOutput


@dataclass(frozen=True)
class State:
    """What one block hands to the next beside the tokens.

    sizes: B M, None while all are 1.
    positions: the input tokens that each token covers; None while nothing was fused or nothing reads them.
    method_state: the method's own.
    residual: B N C, what input tokens differ by from their fused token; None while nothing was fused or nobody asks.
    """

    sizes: Tensor | None = None
    positions: TokenPositions | None = None
    method_state: Any = None
    residual: Tensor | None = None

    def after(self, output: BlockOutput, *, shares: bool, residual_of: Tensor | None = None) -> "State":
        """The state after one more block.

        shares: keep the share of each input token in its fused token. residual_of: the tokens that entered the block
        (B M C), where their differences to the fused ones are kept.
        """
        if output.assignment is None:
            return State(output.sizes, self.positions, output.method_state, self.residual)
        residual, weights = None, output.weights
        if residual_of is not None and weights is not None:
            # residuals cancel in the mean as exactly as its weights are divided: in float64 for tokens in float64
            weights = weights.to(torch.promote_types(weights.dtype, residual_of.dtype))
            mean, _ = kernels.merge(residual_of, output.assignment, weights=weights)
            residual = self.unpool(residual_of - output.assignment.unpool(mean))
        positions = positions_after(self.positions, output.assignment, weights if shares else None)
        return State(output.sizes, positions, output.method_state, residual)

    def unpool(self, x: Tensor) -> Tensor:
        """One token per input token: B M C -> B N C."""
        if self.positions is None:
            return x
        copied = self.positions.source.unpool(x)
        return copied if self.residual is None else copied + self.residual.to(copied.dtype)


class Run:
    """The states between the blocks of one iteration; kept per block so that recomputation finds its own.

    Their residuals are not kept: a block finds them in the tokens that it is given.
    stack: the fused stack. schedule: one amount per block, the stack's own by default.
    last: what the last block returned, the fused tokens behind it, and the state with its residual.
    sequences: those of the batch, where it has several; groups: a run for each group of them.
    """

    def __init__(self, stack: Any, schedule: Sequence[Amount] | None = None) -> None:
        self.stack = stack
        self.schedule = stack.schedule if schedule is None else schedule
        self.states: dict[int, State] = {0: State()}
        self.last: tuple[Tensor, Tensor, State] | None = None
        self.sequences: Sequences | None = None
        self.groups: list[Run] = []
        self._parts: tuple[Tensor, list[tuple[Tensor, Tensor | None]]] | None = None  # what was returned, split

    def fused(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """The fused tokens behind x (B N C), B M C, and the state with what x has beside them."""
        if state.positions is None:
            return x, state
        if self.last is not None and self.last[0] is x:  # hosts do not change tokens in place between blocks
            return self.last[1:]
        source, shares = state.positions.source, state.positions.shares
        if not self.stack.keeps_residual:
            return source.first_of_slot(x), state
        tokens, _ = kernels.merge(x, source, weights=shares)
        return tokens, State(state.sizes, state.positions, state.method_state, x - source.unpool(tokens))

    def run_block(
        self, index: int, x: Tensor, arguments: Mapping[str, Any], padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Block `index`, B N C -> B N C: fuses inside, restores each input token from its fused token.

        padding: B P C, tokens that attend to those of x, and to which nothing attends. It is returned as it leaves the
        block.
        """
        stack = self.stack
        if index not in self.states:
            raise MctfError(f"block {index} of a fused stack was called before block {index - 1}: call them in order")
        tokens, state = self.fused(x, self.states[index])
        if padding is not None:
            padding = stack.run_padding(index, padding, tokens, state=state, arguments=arguments)
        output = stack.run_block(
            index, tokens, state=state, arguments=arguments, initial=x.shape[1], schedule=self.schedule
        )
        if index + 1 not in self.states:  # gradient checkpointing calls again, from the last block to the first
            stack.notify(index, tokens, output)
        residual = stack.keeps_residual
        shares = stack.host.uses_positions or residual
        state = state.after(output, shares=shares, residual_of=tokens if residual else None)
        self.states[index + 1] = State(state.sizes, state.positions, state.method_state)
        result = state.unpool(output.x)
        if index + 1 == stack.depth:
            restored = stack.method.restore_tokens(output.x, state.method_state)
            result = result if restored is None else restored
        self.last = None if trains(result) else (result, output.x, state)
        return result, padding

    def run_sequences(self, index: int, x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """`run_block` on several sequences; where no block fuses, the block itself on all of them at once."""
        stack = self.stack
        if not any(self.schedule) and not stack.is_observed:
            return stack.run_whole(index, x, arguments)
        if index == 0 or self.sequences is None:
            self.sequences = stack.host.sequences(x, arguments)
        if not self.groups:
            self.groups = [Run(stack, self.schedule) for _ in self.sequences.groups]
        if stack.is_observed and len(self.groups) > 1:
            raise MctfError(
                "a trace records images with equally many patches, and these have "
                f"{len(self.groups)} different numbers: trace images of one size"
            )
        parts = self._parts[1] if self._parts is not None and self._parts[0] is x else self.sequences.split(x)
        outputs = []
        for group, run, (tokens, padding) in zip(self.sequences.groups, self.groups, parts, strict=True):
            given = stack.host.sequence_arguments(arguments, group)
            outputs.append(run.run_block(index, tokens, given, padding))
        result = self.sequences.join(outputs, like=x)
        self._parts = None if trains(result) else (result, outputs)
        return result if any(self.schedule) else stack.run_whole(index, x, arguments)


def trains(x: Tensor) -> bool:
    """Whether tokens have a gradient: a checkpointed block must depend on nothing but what it is given.

    A trace has no gradient.
    """
    return x.requires_grad and not torch.jit.is_tracing()
