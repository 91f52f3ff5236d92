"""The seam: a host's stack of blocks, run under one method.

A FusedStack takes the place of the host's container (timm: `model.blocks`). It holds the *same* block modules under the
*same* names, so the state_dict does not change and the rest of the host's code runs as before. All state of a forward
pass lives in local variables or in one `Run` (_run.py): two threads can share a model.

Hosts use their container in two ways:

- *Calling* it runs all blocks. The fused tokens come out, or one token per input token if the host's head reads them
  all or the user asked for `dense=True`.
- *Iterating* over it (feature maps, gradient checkpointing, Hugging Face encoders) yields blocks bound to one fresh
  run. As the caller may keep what each block returns, a bound block takes and returns one token per input token and
  fuses only inside. Without gradient, a block that is given what the block before it returned continues with the fused
  tokens behind it, so that a compiled loop never unpools them.

Where one token per input token is returned, token i of slot g is restored from its fused token: by a copy of x_g, or by
x_g plus its residual, the differences x_i - mean_g(x) of all fusions on its way. The mean is that of pooling, so the
residuals of a slot cancel in it: the fused token is the pooled mean of the restored ones. Dropped tokens have weight 0
in that mean, and restored they follow the kept token of their slot at the distance at which they were dropped.

A host may pass padded images, or images packed into one sequence. Images of equally many tokens then run as a batch of
their own, with its own run; padding attends to the tokens of its image, and nothing attends to it or fuses with it.

It is one file, as bound blocks, proxies of blocks and what the head reads are parts of one FusedStack.

Axes: B images, N tokens entering the stack, M tokens at some block, C channels.
"""

import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from ._run import Run, State
from ._sharding import run_in_call
from .core.positions import TokenPositions
from .core.schedule import Amount, ReductionSpec, plain_r, reductions, stage_of
from .core.selection import fill_padding
from .core.sequences import SequenceGroup, Sequences
from .errors import MctfError
from .methods.base import BlockContext, BlockOps, BlockOutput, Method, run_first

RESTORES = ("residual", "copy")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class StackHost(Protocol):
    """The interface of the host model. It is read anew in each forward pass, as users may replace the head."""

    @property
    @abstractmethod
    def protected(self) -> int:
        """Number of leading tokens (class, distillation, registers) that must survive in place."""

    @property
    @abstractmethod
    def reads_every_token(self) -> bool:
        """Whether what follows the stack needs one token per input token."""

    @property
    @abstractmethod
    def reads_protected_only(self) -> bool:
        """Whether the model's head reads protected tokens alone.

        Callers of its `forward_features` may read more: a host where this can be true attaches `HeadReads`.
        """

    @property
    @abstractmethod
    def after_blocks(self) -> Sequence[nn.Module]:
        """Modules between the stack and the classifier, where `reads_protected_only`."""

    @property
    @abstractmethod
    def uses_positions(self) -> bool:
        """Whether the blocks need the positions of their tokens: rotary tables, relative position biases."""

    @abstractmethod
    def arguments(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """Block arguments beside the tokens, by name; raises MctfError for those that fused tokens cannot follow."""

    @abstractmethod
    def ops(self, block: nn.Module, arguments: Mapping[str, Any], positions: TokenPositions | None) -> BlockOps:
        """The pieces of a block for one call; positions is None while nothing was fused."""

    @abstractmethod
    def has_sequences(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the tokens of a call are several sequences: padded, or packed one behind the other."""

    @abstractmethod
    def sequences(self, x: Tensor, arguments: Mapping[str, Any]) -> Sequences:
        """The sequences of a call; raises MctfError for a mask that is not one of sequences."""

    @abstractmethod
    def call_whole(self, block: nn.Module, x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """The block itself on several sequences, in the layout that the model gives."""

    @abstractmethod
    def sequence_arguments(self, arguments: Mapping[str, Any], group: SequenceGroup) -> Mapping[str, Any]:
        """The arguments of a call for the sequences of one group alone."""

    @abstractmethod
    def uninstall(self, stack: "FusedStack") -> None:
        """Take the stack out of the model again."""


class Observer(Protocol):
    """Gets the output of every block."""

    def record(self, index: int, x: Tensor, output: BlockOutput) -> None:
        """Block `index` ran on x. Called in the thread of the forward pass, which need not be the observer's."""


class FusedStack(nn.Module):
    """The host's blocks, reduced by `method` with `schedule[i]` tokens in block i.

    dense: return one token per input token whatever the host's head reads.
    trim_last: where nothing but protected tokens is read, the last block computes queries, projection and MLP for
    those alone, and the stack returns them alone. That holds in the model's own forward (`HeadReads`) and where
    `features_for_head` runs the blocks. Results are the same; traces and hooks switch it off. None: where the method
    wants it and fuses anything, so that r = 0 is the unfused model bit for bit.
    restore: how one token per input token is made of the fused ones, "residual" or "copy". Methods that restore tokens
    themselves are trained with copies and keep to them.
    layers: the method's learned layers, by block number; they are registered elsewhere in the model.
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
        trim_last: bool | None = False,
        restore: str = RESTORES[0],
        layers: nn.ModuleDict | None = None,
    ) -> None:
        super().__init__()
        for name, block in container._modules.items():  # named_children() lists a block that occurs twice once
            self.add_module(name, block)
        self.training = container.training  # not train(): single blocks may be in another mode
        self.host = host
        self.method = method
        self.dense = dense
        self.trim_last = trim_last
        self.restore = restore
        self.depth = len(self)  # of the whole model, also in a stack of its first few blocks
        self.blocks = None if blocks is None else tuple(block % len(self) for block in blocks)
        self.schedule: tuple[Amount, ...] = ()
        self._layers = (layers,)  # in a tuple: not to be registered
        self.set_r(r)
        self.fused_r = self.r  # what the layers were made for
        self.bound_block: type[BoundBlock] = BoundBlock  # what an iteration yields; a host may have its own kind
        self._container = (container,)  # in a tuple: as an attribute it would register all blocks twice
        self._observers: list[Observer] = []
        self._head_reads: set[int] = set()  # threads whose next pass is for the model's head alone
        self._head_reads_traced = False  # the same while torch.compile or torch.export traces: it guards what it reads

    @property
    def layers(self) -> nn.ModuleDict | None:
        """The method's learned layers."""
        return self._layers[0]

    def set_r(self, r: ReductionSpec) -> None:
        """Change the schedule; takes effect with the next forward pass."""
        self.schedule = self.make_schedule(r)
        self.r = plain_r(r)

    def make_schedule(self, r: ReductionSpec) -> tuple[Amount, ...]:
        """One amount per block from r and the blocks that this model was fused with.

        Raises MctfError where the method cannot follow it, or has no layers for a block.
        """
        per_block = isinstance(r, Sequence) and not isinstance(r, str)  # it names every block itself
        schedule = self.method.make_schedule(r, depth=len(self), blocks=None if per_block else self.blocks)
        self.method.check_schedule(schedule)
        if self.layers is not None:
            lacking = next(
                (index for index, amount in enumerate(schedule) if amount and str(index) not in self.layers), None
            )
            if lacking is not None:
                raise MctfError(self.method.lacks_layers(lacking))
        return schedule

    @property
    def keeps_residual(self) -> bool:
        """Whether restored tokens get back what fusing took from them.

        Not for a head that reads the tokens that are left, as LV-ViT's second classifier: it would get others from an
        iteration (gradient checkpointing) than from a call.
        """
        wanted = self.restore == "residual" and not self.method.restores_tokens
        return wanted and (self.dense or self.host.reads_every_token or self.host.reads_protected_only)

    def fuses(self) -> bool:
        """Whether any block reduces its tokens."""
        return any(self.schedule)

    def restored(self) -> nn.Module:
        """The host's own container, holding the blocks as they are now."""
        (container,) = self._container
        container._modules.update(self._modules)
        container.training = self.training
        return container

    def forward(self, x: Tensor, *args: Any, schedule: Sequence[Amount] | None = None, **kwargs: Any) -> Tensor:
        """All blocks: B N C -> B M C, or B N C where every token is read; protected tokens alone with `trim_last`.

        schedule: one amount per block for this pass alone, in place of the stack's own.
        """
        _refuse_proxy(x)
        schedule = self.schedule if schedule is None else schedule
        arguments = self.host.arguments(*args, **kwargs)
        unpool, shares = self.dense or self.host.reads_every_token, self.host.uses_positions
        residual = unpool and self.keeps_residual
        state, initial = State(), x.shape[1]
        trimmed = self._take_head_reads() and not unpool and self._trims(schedule)
        for index in range(len(self)):
            if trimmed and index == len(self) - 1:
                block = self.host.ops(self.block_modules()[index], arguments, state.positions)
                return run_first(block, x, self.method.key_sizes(state.sizes), self.host.protected)
            output = self.run_block(index, x, state=state, arguments=arguments, initial=initial, schedule=schedule)
            self.notify(index, x, output)
            if unpool or shares:
                state = state.after(output, shares=shares, residual_of=x if residual else None)
            else:
                state = State(output.sizes, method_state=output.method_state)
            x = output.x
        restored = self.method.restore_tokens(x, state.method_state)
        if restored is not None:
            return restored
        if unpool:
            return state.unpool(x)
        return fill_padding(x, state.sizes) if self.method.adaptive else x

    def _trims(self, schedule: Sequence[Amount]) -> bool:
        """Whether the last block runs for protected tokens alone: where nobody reads, or fuses, the others."""
        method = self.method
        if not method.trims(schedule, self.trim_last) or (self.training and method.learned) or self._observers:
            return False
        if not self.host.reads_protected_only or not self.host.protected:
            return False
        last = self.block_modules()[-1]
        modules = (self, *last.modules(), *chain.from_iterable(each.modules() for each in self.host.after_blocks))
        return not any(getattr(module, hooks) for module in modules for hooks in _HOOKS)

    def set_head_reads(self, value: bool) -> None:
        """Whether the next pass in this thread is for the model's head alone."""
        if torch.compiler.is_compiling():
            self._head_reads_traced = value
        elif value:
            self._head_reads.add(threading.get_ident())
        else:
            self._head_reads.discard(threading.get_ident())

    def _take_head_reads(self) -> bool:
        """Whether this pass is; the next one is not."""
        value = self._head_reads_traced if torch.compiler.is_compiling() else threading.get_ident() in self._head_reads
        self.set_head_reads(False)
        return value

    def run_block(
        self,
        index: int,
        x: Tensor,
        *,
        state: State,
        arguments: Mapping[str, Any],
        initial: int,
        schedule: Sequence[Amount],
    ) -> BlockOutput:
        """Block `index` on x (B M C), in a pass that began with `initial` tokens."""
        amount, protected = schedule[index], self.host.protected
        if self.training and self.method.masks_in_training:
            r = reductions(schedule, initial, protected=protected, method=self.method)[index].num_reduced
        else:
            stage = stage_of(schedule, index)
            r = self.method.num_reduced(amount, x.shape[1], protected=protected, initial=initial, stage=stage)
        layers = self.layers
        ctx = BlockContext(
            r=r,
            protected=protected,
            index=index,
            depth=self.depth,
            method_state=state.method_state,
            layers=layers[str(index)] if layers is not None and str(index) in layers else None,
            training=self.training,
            next_reduces=any(schedule[index + 1 : index + 2]),
            amount=amount,
            dense=self.dense,
        )
        module = self.block_modules()[index]
        block = self.host.ops(module, arguments, state.positions)
        output = run_in_call(module, lambda x: self.method.run(block, x, state.sizes, ctx), x)
        if not isinstance(output, BlockOutput):
            raise MctfError(f"`run` of {self.method.name} returns {type(output).__name__}: return a BlockOutput")
        return output

    def run_whole(self, index: int, x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Block `index` as it is, in the layout that the host gives."""
        module = self.block_modules()[index]
        return run_in_call(module, lambda x: BlockOutput(self.host.call_whole(module, x, arguments), None), x).x

    def run_padding(
        self, index: int, padding: Tensor, x: Tensor, *, state: State, arguments: Mapping[str, Any]
    ) -> Tensor:
        """Padding (B P C) after block `index`, where it attends to the tokens x (B M C) alone: to sizes above 0.

        Where blocks need positions, padding has none. It stays as it is, as no head of such a model reads it.
        """
        if self.host.uses_positions:
            return padding
        module, count = self.block_modules()[index], padding.shape[1]
        block = self.host.ops(module, arguments, state.positions)
        sizes = self.method.key_sizes(state.sizes)
        sizes = x.new_ones(x.shape[:2], dtype=torch.float32) if sizes is None else sizes
        sizes = torch.cat([sizes.new_zeros(padding.shape[:2]), sizes], dim=1)
        together = torch.cat([padding, x], dim=1)
        return run_in_call(module, lambda x: BlockOutput(run_first(block, x, sizes, count), None), together).x

    @property
    def is_observed(self) -> bool:
        return bool(self._observers)

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """While open, the observer gets the output of every block of every pass, in whatever thread it runs."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def notify(self, index: int, x: Tensor, output: BlockOutput) -> None:
        """Tell the observers what block `index` made of x."""
        for observer in tuple(self._observers):  # another thread may add or remove its own meanwhile
            observer.record(index, x, output)

    def block_modules(self) -> list[Any]:
        """The host's own blocks."""
        return list(self._modules.values())

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator["BoundBlock"]:
        run = Run(self)
        return iter([self.bound_block(run, index, block) for index, block in enumerate(self.block_modules())])

    def __getitem__(self, index: int | slice) -> Any:
        """One block to read (calling it alone is refused), or the first few blocks as a fused stack."""
        if isinstance(index, int):
            return IndexedBlock(index % len(self), self.block_modules()[index])
        start, stop, stride = index.indices(len(self))
        if start != 0 or stride != 1:
            raise MctfError("a fused stack can only be sliced from its first block on: run mctf.unfuse(model) first")
        container, r = nn.Sequential(*self.block_modules()[:stop]), self.schedule[:stop]
        trim_last = self.trim_last if stop == len(self) else False
        first = FusedStack(
            container,
            self.host,
            self.method,
            r=r,
            blocks=None,
            dense=self.dense,
            trim_last=trim_last,
            restore=self.restore,
        )
        first.depth = self.depth
        first._layers = self._layers
        first.training = self.training
        first.bound_block = self.bound_block
        first.blocks = None if self.blocks is None else tuple(block for block in self.blocks if block < stop)
        first._observers = self._observers
        return first

    def extra_repr(self) -> str:
        return (
            f"method={self.method}, r={self.r!r}, blocks={self.blocks}, dense={self.dense}, "
            f"trim_last={self.trim_last}, restore={self.restore!r}"
        )


class HeadReads:
    """Pre-hook (value True) and hook (False) of a model: in between, its head alone reads what the stack returns."""

    def __init__(self, stack: FusedStack, value: bool) -> None:
        self.stack = stack
        self.value = value

    @classmethod
    def attach(cls, model: nn.Module, stack: FusedStack) -> None:
        model.register_forward_pre_hook(cls(stack, True))
        model.register_forward_hook(cls(stack, False), always_call=True)  # after a failure as well

    @classmethod
    def detach(cls, model: nn.Module) -> None:
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, cls)]:
                del hooks[key]
                model._forward_hooks_always_called.pop(key, None)

    def __call__(self, *_: Any) -> None:
        self.stack.set_head_reads(self.value)


def features_for_head(model: Any, images: Tensor) -> Any:
    """The model's `forward_features` for its `forward_head` alone, as its own forward runs them."""
    stack = getattr(model, "blocks", None)
    if not isinstance(stack, FusedStack):
        return model.forward_features(images)
    stack.set_head_reads(True)
    try:
        return model.forward_features(images)
    finally:
        stack.set_head_reads(False)


def _refuse_proxy(x: object) -> None:
    """Raise MctfError while torch.fx traces a model: fusing reads the values of tokens."""
    if isinstance(x, Proxy):
        raise MctfError(
            "a fused model cannot be traced by torch.fx, as fusing reads the values of tokens: use timm's "
            "forward_intermediates for features, torch.export or torch.jit.trace for a graph"
        )


class _BlockProxy:
    """Reads and writes the attributes of a block."""

    def __init__(self, index: int, block: nn.Module) -> None:
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_block", block)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_block"), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._block, name, value)


class IndexedBlock(_BlockProxy):
    """`model.blocks[i]` of a fused model: readable like the block, an instance of its class, not callable alone.

    It equals the block and has its `__dict__`: FSDP2 keeps its state there, and by module.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._block)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return vars(self._block)

    def __eq__(self, other: object) -> bool:
        return getattr(other, "_block", other) is self._block

    def __hash__(self) -> int:
        return hash(self._block)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return IndexedBlock, (self._index, self._block)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise MctfError(
            f"block {self._index} of a fused stack cannot be called alone, as it needs the sizes of the fused tokens: "
            "iterate over the blocks from the first on, or run mctf.unfuse(model)"
        )


class BoundBlock(_BlockProxy):
    """One block of an iterated stack: callable like the block, readable like the block."""

    def __init__(self, run: Run, index: int, block: nn.Module) -> None:
        super().__init__(index, block)
        object.__setattr__(self, "_run", run)

    def __iter__(self) -> Iterator[nn.Module]:
        """The block itself, as a list of one: `fully_shard(block)` in a loop over the blocks takes it so."""
        return iter([self._block])

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """B N C -> B N C: fuses inside, returns each input token as restored from its fused token."""
        _refuse_proxy(x)
        host = self._run.stack.host
        arguments = host.arguments(*args, **kwargs)
        if host.has_sequences(arguments):
            return self._run.run_sequences(self._index, x, arguments)
        return self._run.run_block(self._index, x, arguments)[0]
