"""A host's stack of blocks, run under one method.

A FusedStack takes the place of the host's container (timm: `model.blocks`) and holds the *same* block modules
under the *same* names, so the state_dict does not change and the rest of the host's code runs as ever. All state
of a forward pass lives in local variables or in one `_Run`: two threads can share a model.

Hosts use their container in two ways. *Calling* it runs all blocks; the fused tokens come out, spread back to one
per input token if the host's head reads them all. *Iterating* over it (feature maps, gradient checkpointing)
yields blocks bound to one fresh run; as the caller may keep what each block returns, these take and give one
token per input token, and fuse only inside.

Axes: B images, N tokens entering the stack, M tokens at some block, C channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from .core.assignment import Assignment
from .core.schedule import Entry, ReductionSpec, make_schedule, tokens_to_fuse
from .errors import MctfError
from .methods.base import BlockOps, Method, Step

if TYPE_CHECKING:
    from .tracing import Trace


class StackHost(Protocol):
    """What the stack asks of the model around it, anew in each forward pass: users change heads."""

    @property
    def protected(self) -> int:
        """How many leading tokens (class, distillation, registers) must survive in place."""

    @property
    def reads_every_token(self) -> bool:
        """Whether what follows the stack needs one token per input token."""

    def ops(self, block: nn.Module) -> BlockOps: ...
    def uninstall(self, stack: "FusedStack") -> None:
        """Take the stack out of the model again."""


@dataclass(frozen=True)
class _State:
    """What one block hands to the next beside the tokens.

    sizes: B M, None while all are 1. source: the slot of every input token, None while nothing was fused.
    """

    sizes: Tensor | None = None
    source: Assignment | None = None

    def after(self, step: Step) -> "_State":
        source = self.source
        if step.assignment is not None:
            source = step.assignment if source is None else source.then(step.assignment)
        return _State(step.sizes, source)


class FusedStack(nn.Module):
    """The host's blocks, fused by `method` with `schedule[i]` tokens leaving block i."""

    def __init__(
        self,
        container: nn.Module,
        host: StackHost,
        method: Method,
        *,
        r: ReductionSpec,
        blocks: tuple[int, ...] | None,
    ) -> None:
        super().__init__()
        for name, block in container.named_children():
            self.add_module(name, block)
        self.training = container.training  # not train(): single blocks may be in another mode
        self.host = host
        self.method = method
        self.blocks = None if blocks is None else tuple(block % len(self) for block in blocks)
        self.schedule: tuple[Entry, ...] = ()
        self.set_r(r)
        self._container = (container,)  # in a tuple: as an attribute it would register all blocks twice
        self._traces: list[Trace] = []

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

    def forward(self, x: Tensor) -> Tensor:
        """All blocks: B N C -> B M C, or B N C where the host's head reads every token."""
        track = self.host.reads_every_token
        state = _State()
        for index in range(len(self)):
            step = self._step(index, x, state)
            self._record(index, x, step)
            x = step.x
            state = state.after(step) if track else _State(step.sizes)
        return x if state.source is None else state.source.spread(x)

    def _step(self, index: int, x: Tensor, state: _State) -> Step:
        protected = self.host.protected
        r = tokens_to_fuse(self.schedule[index], x.shape[1], protected=protected, min_tokens=self.method.min_tokens)
        block = self.host.ops(self[index])
        return self.method.run(block, x, state.sizes, r=r, protected=protected)

    def _record(self, index: int, x: Tensor, step: Step) -> None:
        for trace in tuple(self._traces):  # another thread's trace may begin or end meanwhile
            trace.record(index, x, step)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator["BoundBlock"]:
        run = _Run(self)
        return iter([BoundBlock(run, index, self[index]) for index in range(len(self))])

    def __getitem__(self, index: int | slice) -> Any:
        """A block itself, or the first few blocks as a fused stack of their own."""
        blocks = list(self.children())
        if isinstance(index, int):
            return blocks[index]
        start, stop, stride = index.indices(len(self))
        if start != 0 or stride != 1:
            raise MctfError("a fused stack can only be sliced from its first block on: run mctf.unfuse(model) first")
        first = FusedStack(nn.Sequential(*blocks[:stop]), self.host, self.method, r=self.schedule[:stop], blocks=None)
        first.training = self.training
        first.blocks = None if self.blocks is None else tuple(block for block in self.blocks if block < stop)
        first._traces = self._traces
        return first

    def extra_repr(self) -> str:
        return f"method={self.method}, r={self.r!r}, blocks={self.blocks}"


class _Run:
    """The states between the blocks of one iteration; kept per block so that recomputation finds its own."""

    def __init__(self, stack: FusedStack) -> None:
        self.stack = stack
        self.states: dict[int, _State] = {0: _State()}


class BoundBlock:
    """One block of an iterated stack: callable like the block, readable like the block."""

    def __init__(self, run: _Run, index: int, block: nn.Module) -> None:
        object.__setattr__(self, "_bound", (run, index, block))

    def __call__(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """B N C -> B N C: fuses inside, gives each input token the value of its fused token."""
        run, index, _ = self._bound
        if any(value is not None and value is not False for value in (*args, *kwargs.values())):
            raise MctfError("a fused model takes no attention mask or other block arguments: run mctf.unfuse(model)")
        if index not in run.states:
            raise MctfError(f"block {index} of a fused stack was called before block {index - 1}: call them in order")
        state = run.states[index]
        tokens = x if state.source is None else state.source.pick(x)
        step = run.stack._step(index, tokens, state)
        if index + 1 not in run.states:  # gradient checkpointing calls again, from the last block to the first
            run.stack._record(index, tokens, step)
        state = state.after(step)
        run.states[index + 1] = state
        return step.x if state.source is None else state.source.spread(step.x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound[2], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._bound[2], name, value)
