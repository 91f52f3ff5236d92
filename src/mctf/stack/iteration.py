"""The blocks of a fused stack one by one, for callers that loop over them.

As the caller may keep what each block returns, a bound block takes and gives one token per input token. Without
gradient, a block that is given what the block before it returned goes on with the fused tokens behind it: a compiled
loop never spreads them.

Axes: B images, N tokens entering the stack, M tokens at some block, C channels.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..errors import MctfError
from .state import State

if TYPE_CHECKING:
    from .fused import FusedStack


class Run:
    """The states between the blocks of one iteration; kept per block so that recomputation finds its own.

    given: what the last block gave, and the fused tokens behind it.
    """

    def __init__(self, stack: "FusedStack") -> None:
        self.stack = stack
        self.states: dict[int, State] = {0: State()}
        self.given: tuple[Tensor, Tensor] | None = None

    def fused(self, x: Tensor, state: State) -> Tensor:
        """The fused tokens behind x (B N C): B M C."""
        if state.places is None:
            return x
        if self.given is not None and self.given[0] is x:  # nobody changes tokens in place between blocks
            return self.given[1]
        return state.places.source.pick(x)


class BoundBlock:
    """One block of an iterated stack: callable like the block, readable like the block."""

    def __init__(self, run: Run, index: int, block: nn.Module) -> None:
        object.__setattr__(self, "_bound", (run, index, block))

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """B N C -> B N C: fuses inside, gives each input token the value of its fused token."""
        run, index, _ = self._bound
        host = run.stack.host
        arguments = host.arguments(*args, **kwargs)
        if index not in run.states:
            raise MctfError(f"block {index} of a fused stack was called before block {index - 1}: call them in order")
        state = run.states[index]
        tokens = run.fused(x, state)
        step = run.stack.run_block(index, tokens, state=state, arguments=arguments, initial=x.shape[1])
        if index + 1 not in run.states:  # gradient checkpointing calls again, from the last block to the first
            run.stack.tell_watchers(index, tokens, step)
        state = state.after(step, shares=host.carries_places)
        run.states[index + 1] = state
        spread = state.spread(step.x)
        if index + 1 == len(run.stack):
            finished = run.stack.method.finish(step.x, state.carry)
            spread = spread if finished is None else finished
        # with gradient a checkpointed block must depend on nothing but what it is given
        run.given = None if spread.requires_grad else (spread, step.x)
        return spread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound[2], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._bound[2], name, value)
