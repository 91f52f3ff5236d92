"""A model's answers to one batch, with its own r and, beside that, with another.

Both branches have the same weights and the same patch embedding. Where the host calls its stack of blocks, it runs
once: the stack takes the embedded patches twice, and hands both results, one below the other, to the host's own
norm and head. A host that loops over its blocks (or has gradient checkpointing on) runs twice.

Axes: B images, K classes, N tokens, C channels.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..api import find_stack, fused_stack
from ..core.schedule import ReductionSpec
from ..methods.base import BlockOutput
from ..stack import FusedStack


@dataclass(frozen=True)
class TeacherOutput:
    """What the model said of a batch before it was trained.

    tokens: B N C after the final norm. logits: B K, None where its classifier did not know the classes.
    """

    tokens: Tensor | None
    logits: Tensor | None


@dataclass(frozen=True)
class Branch:
    """What a model says of a batch, in float32 or wider.

    logits: B K. features: B C, what its classifier reads: the class token after the final norm; in a model without
    class token the pooled tokens, in one with a distillation token the mean of both tokens.

    For a method's own loss: tokens, all of them after the final norm, B N C, None where two branches ran as one;
    carries: what the method handed on from each block; lesson: None unless the method learns from the original model.
    """

    logits: Tensor
    features: Tensor
    tokens: Tensor | None = None
    carries: tuple[Any, ...] = ()
    lesson: TeacherOutput | None = None


def run_branch(model: nn.Module, images: Tensor) -> Branch:
    """The model as it is, on images B 3 H W."""
    with _watching(model) as passes:
        branch = _read(model, model.forward_features(images))  # type: ignore[operator]
    return replace(branch, carries=passes.of(0))


def run_branches(model: nn.Module, images: Tensor, lighter: ReductionSpec) -> tuple[Branch, Branch]:
    """A fused model with its own r, and with `lighter` in its place."""
    with _watching(model) as passes, _running_twice(fused_stack(model), lighter):
        both = _read(model, model.forward_features(images))  # type: ignore[operator]
    if len(both.logits) > len(images):
        logits, features = both.logits.chunk(2), both.features.chunk(2)
        first, second = (Branch(logits[i], features[i], carries=passes.of(i)) for i in (0, 1))
        return first, second
    with _set(fused_stack(model), lighter):
        return replace(both, carries=passes.of(0)), run_branch(model, images)


def _read(model: Any, tokens: Tensor) -> Branch:
    return Branch(_wide(model.forward_head(tokens)), _wide(model.forward_head(tokens, pre_logits=True)), tokens)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Passes:
    """Keeps what the method hands on from block to block, pass by pass."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._seen: list[list[Any]] = []

    @torch.compiler.disable
    def record(self, index: int, x: Tensor, step: BlockOutput) -> None:
        if threading.get_ident() != self._thread:
            return
        if index == 0:
            self._seen.append([])
        self._seen[-1].append(step.method_state)

    def of(self, index: int) -> tuple[Any, ...]:
        """One amount a block; empty for a model that is not fused."""
        return tuple(self._seen[index]) if self._seen else ()


@contextmanager
def _watching(model: nn.Module) -> Iterator[_Passes]:
    passes, stack = _Passes(), find_stack(model)
    if stack is None:
        yield passes
        return
    with stack.observed_by(passes):
        yield passes


@contextmanager
def _set(stack: FusedStack, r: ReductionSpec) -> Iterator[None]:
    before = stack.r
    stack.set_r(r)
    try:
        yield
    finally:
        stack.set_r(before)


@contextmanager
def _running_twice(stack: FusedStack, lighter: ReductionSpec) -> Iterator[None]:
    """While open, a call of the stack gives 2B rows: those of its own r, then those of `lighter`."""

    def again(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor:
        with _set(stack, lighter):
            second = stack.forward(*inputs, **named)
        tokens = max(output.shape[1], second.shape[1])
        return torch.cat([_lengthened(output, tokens), _lengthened(second, tokens)])

    handle = stack.register_forward_hook(again, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _lengthened(x: Tensor, tokens: int) -> Tensor:
    """B M C -> B `tokens` C, the last token standing in for those that are not there.

    A head that takes fused tokens as they are cannot mind how often a token is there: each stands for several.
    """
    missing = tokens - x.shape[1]
    return x if missing == 0 else torch.cat([x, x[:, -1:].expand(-1, missing, -1)], dim=1)
