"""What a fused stack knows of those around it: the model it serves, and whoever watches."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from .core.positions import TokenPositions
from .methods.base import BlockOps

if TYPE_CHECKING:
    pass
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .core.positions import positions_after
from .core.schedule import Amount, ReductionSpec, make_schedule, reductions, stage_of
from .core.selection import fill_padding
from .errors import MctfError
from .methods.base import BlockContext, BlockOutput, Method


class StackHost(Protocol):
    """What the stack asks of the model around it, anew in each forward pass: users change heads."""

    @property
    @abstractmethod
    def protected(self) -> int:
        """How many leading tokens (class, distillation, registers) must survive in position."""

    @property
    @abstractmethod
    def reads_every_token(self) -> bool:
        """Whether what follows the stack needs one token per input token."""

    @property
    @abstractmethod
    def uses_positions(self) -> bool:
        """Whether the blocks ask where their tokens are: rotary tables, relative position biases."""

    @abstractmethod
    def arguments(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """What a block is called with beside the tokens; raises MctfError for what fused tokens cannot follow."""

    @abstractmethod
    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> BlockOps:
        """The pieces of a block for one call; positions is None while nothing was fused."""

    @abstractmethod
    def uninstall(self, stack: "FusedStack") -> None:
        """Take the stack out of the model again."""


class Observer(Protocol):
    """Somebody who is told what every block does."""

    def record(self, index: int, x: Tensor, step: BlockOutput) -> None:
        """Block `index` was given x. Called in the thread of the pass, which need not be the observer's."""


# MERGED from mctf.stack:
# The state of a forward pass between two blocks.
#
# Axes: B images, N tokens entering the stack, M tokens at some block, C channels.


@dataclass(frozen=True)
class State:
    """What one block hands to the next beside the tokens.

    sizes: B M, None while all are 1. positions: what the tokens cover, None while nothing was fused or nobody asks.
    method_state: the method's own.
    """

    sizes: Tensor | None = None
    positions: TokenPositions | None = None
    method_state: Any = None

    def after(self, step: BlockOutput, *, shares: bool) -> "State":
        """The state after one more block; shares: whether anybody asks for the share of each position in a token."""
        if step.assignment is None:
            return State(step.sizes, self.positions, step.method_state)
        weights = step.weights if shares else None
        return State(step.sizes, positions_after(self.positions, step.assignment, weights), step.method_state)

    def unpool(self, x: Tensor) -> Tensor:
        """One token per input token: B M C -> B N C."""
        return x if self.positions is None else self.positions.source.unpool(x)


# MERGED from mctf.stack:
# The blocks of a fused stack one by one, for callers that loop over them.
#
# As the caller may keep what each block returns, a bound block takes and gives one token per input token. Without
# gradient, a block that is given what the block before it returned goes on with the fused tokens behind it: a compiled
# loop never spreads them.
#
# Axes: B images, N tokens entering the stack, M tokens at some block, C channels.


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
        if state.positions is None:
            return x
        if self.given is not None and self.given[0] is x:  # nobody changes tokens in position between blocks
            return self.given[1]
        return state.positions.source.first_of_slot(x)


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
            run.stack.notify(index, tokens, step)
        state = state.after(step, shares=host.uses_positions)
        run.states[index + 1] = state
        spread = state.unpool(step.x)
        if index + 1 == len(run.stack):
            finished = run.stack.method.restore_tokens(step.x, state.method_state)
            spread = spread if finished is None else finished
        # with gradient a checkpointed block must depend on nothing but what it is given
        run.given = None if spread.requires_grad else (spread, step.x)
        return spread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound[2], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._bound[2], name, value)


# MERGED from mctf.stack:
# All blocks of a host, called as one.
#
# Axes: B images, N tokens entering the stack, M tokens at some block, C channels.


class FusedStack(nn.Module):
    """The host's blocks, fused by `method` with `schedule[i]` tokens leaving block i.

    dense: spread the fused tokens back to one per input token whatever the host's head reads.
    layers: the method's own, by block number; they are registered elsewhere in the model.
    """

    def __init__(
        self,
        container: nn.Module,
        host: StackHost,
        method: Method,
        *,
        r: ReductionSpec,
        blocks: tuple[int, ...] | None,
        dense: bool = False,
        layers: nn.ModuleDict | None = None,
    ) -> None:
        super().__init__()
        for name, block in container.named_children():
            self.add_module(name, block)
        self.training = container.training  # not train(): single blocks may be in another mode
        self.host = host
        self.method = method
        self.dense = dense
        self.blocks = None if blocks is None else tuple(block % len(self) for block in blocks)
        self.schedule: tuple[Amount, ...] = ()
        self.set_r(r)
        self.bound_block: type[BoundBlock] = BoundBlock  # what an iteration yields; a host may have its own kind
        self._layers = (layers,)  # in a tuple: not to be registered
        self._container = (container,)  # in a tuple: as an attribute it would register all blocks twice
        self._observers: list[Observer] = []

    @property
    def layers(self) -> nn.ModuleDict | None:
        """The method's own."""
        return self._layers[0]

    def set_r(self, r: ReductionSpec) -> None:
        """Change how many tokens leave; takes effect with the next forward pass."""
        default_blocks = self.method.default_blocks(len(self))
        blocks = None if isinstance(r, (list, tuple)) else self.blocks  # a list speaks of every block itself
        self.schedule = make_schedule(r, depth=len(self), blocks=blocks, default_blocks=default_blocks)
        self.r = r

    def fuses(self) -> bool:
        """Whether any block is to fuse anything."""
        return any(self.schedule)

    def restored(self) -> nn.Module:
        """The host's own container, holding the blocks as they are now."""
        (container,) = self._container
        container._modules.update(self._modules)
        container.training = self.training
        return container

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """All blocks: B N C -> B M C, or B N C where somebody reads every token."""
        arguments = self.host.arguments(*args, **kwargs)
        spread, shares = self.dense or self.host.reads_every_token, self.host.uses_positions
        state, initial = State(), x.shape[1]
        for index in range(len(self)):
            step = self.run_block(index, x, state=state, arguments=arguments, initial=initial)
            self.notify(index, x, step)
            x = step.x
            state = (
                state.after(step, shares=shares)
                if spread or shares
                else State(step.sizes, method_state=step.method_state)
            )
        finished = self.method.restore_tokens(x, state.method_state)
        if finished is not None:
            return finished
        if spread:
            return state.unpool(x)
        return fill_padding(x, state.sizes) if self.method.adaptive else x

    def run_block(
        self, index: int, x: Tensor, *, state: State, arguments: Mapping[str, Any], initial: int
    ) -> BlockOutput:
        """Block `index` on x (B M C), in a pass that began with `initial` tokens."""
        block = self.host.ops(self[index], arguments, state.positions)
        ctx = BlockContext(
            r=self._leaving(index, x.shape[1], initial),
            protected=self.host.protected,
            index=index,
            depth=len(self),
            method_state=state.method_state,
            layers=self._own_layers(index),
            training=self.training,
            next_reduces=any(self.schedule[index + 1 : index + 2]),
            amount=self.schedule[index],
        )
        return self.method.run(block, x, state.sizes, ctx)

    def _leaving(self, index: int, tokens: int, initial: int) -> int:
        """How many of `tokens` leave a block."""
        protected = self.host.protected
        if self.training and self.method.masks_in_training:
            return reductions(self.schedule, initial, protected=protected, method=self.method)[index].num_reduced
        stage = stage_of(self.schedule, index)
        return self.method.num_reduced(self.schedule[index], tokens, protected=protected, initial=initial, stage=stage)

    def _own_layers(self, index: int) -> nn.Module | None:
        return self.layers[str(index)] if self.layers is not None and str(index) in self.layers else None

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """While open, the observer is told of every block of every pass, of other threads' as well."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def notify(self, index: int, x: Tensor, step: BlockOutput) -> None:
        """Say that block `index` was given x and took this step."""
        for observer in tuple(self._observers):  # another thread's may come or go meanwhile
            observer.record(index, x, step)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[BoundBlock]:
        run = Run(self)
        return iter([self.bound_block(run, index, self[index]) for index in range(len(self))])

    def __getitem__(self, index: int | slice) -> Any:
        """A block itself, or the first few blocks as a fused stack of their own."""
        blocks = list(self.children())
        if isinstance(index, int):
            return blocks[index]
        start, stop, stride = index.indices(len(self))
        if start != 0 or stride != 1:
            raise MctfError("a fused stack can only be sliced from its first block on: run mctf.unfuse(model) first")
        container, r = nn.Sequential(*blocks[:stop]), self.schedule[:stop]
        first = FusedStack(container, self.host, self.method, r=r, blocks=None, dense=self.dense)
        first._layers = self._layers
        first.training = self.training
        first.bound_block = self.bound_block
        first.blocks = None if self.blocks is None else tuple(block for block in self.blocks if block < stop)
        first._observers = self._observers
        return first

    def extra_repr(self) -> str:
        return f"method={self.method}, r={self.r!r}, blocks={self.blocks}, dense={self.dense}"
