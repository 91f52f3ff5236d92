"""Outputs of a model on one batch: with its own r alone, or with its own r and a lighter r' side by side.

Both branches have the same weights. Where the host calls its stack of blocks, they also share one pass of the host: the
stack runs the embedded patches under either schedule and concatenates the results along the batch, so that patch
embedding, final norm and head run once. A host that iterates over its blocks (or has gradient checkpointing on) runs
twice.

Axes: B images, K classes, N tokens, C channels.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..api import find_stack, fused_stack
from ..core.schedule import Amount, ReductionSpec
from ..methods.base import BlockOutput
from ..stack import FusedStack


@dataclass(frozen=True)
class TeacherOutput:
    """Outputs of the frozen original model on a batch.

    tokens: B N C after the final norm. logits: B K, None where its classifier has other classes than the data.
    """

    tokens: Tensor | None
    logits: Tensor | None


@dataclass(frozen=True)
class Branch:
    """Outputs of a model on a batch, in float32 or wider.

    logits: B K. features: B C, the input of the classifier: the class token after the final norm, the pooled tokens
    in a model without class token, the mean of both tokens in one with a distillation token.

    For the loss of a method: tokens, all of them after the final norm, B N C, None where two branches shared one pass;
    method_states: the method's state after each block; teacher: None unless the method learns from the original model.
    """

    logits: Tensor
    features: Tensor
    tokens: Tensor | None = None
    method_states: tuple[Any, ...] = ()
    teacher: TeacherOutput | None = None


def run_branch(model: nn.Module, images: Tensor) -> Branch:
    """The model with its own r, or unfused, on images B 3 H W."""
    states, stack = _MethodStates(), find_stack(model)
    with nullcontext() if stack is None else stack.observed_by(states):
        branch = _outputs(model, images)
    return replace(branch, method_states=states.of_pass(0))


def run_branches(model: nn.Module, images: Tensor, lighter: ReductionSpec) -> tuple[Branch, Branch]:
    """A fused model with its own r, and with `lighter` in its place."""
    stack, states = fused_stack(model), _MethodStates()
    with stack.observed_by(states), _both_schedules(stack, stack.make_schedule(lighter)):
        both = _outputs(model, images)
    if len(both.logits) == len(images):  # the host iterates over the blocks: that was the first branch alone
        with _set_r(stack, lighter):
            return replace(both, method_states=states.of_pass(0)), run_branch(model, images)
    (logits, lighter_logits), (features, lighter_features) = both.logits.chunk(2), both.features.chunk(2)
    return (
        Branch(logits, features, method_states=states.of_pass(0)),
        Branch(lighter_logits, lighter_features, method_states=states.of_pass(1)),
    )


@torch.no_grad()
def run_inference(model: nn.Module, images: Tensor) -> Branch:
    """The model in evaluation mode and without gradient; every module returns to its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return run_branch(model, images)
    finally:
        for module, training in modes.items():
            module.training = training


def _outputs(model: Any, images: Tensor) -> Branch:
    tokens = model.forward_features(images)
    outputs = model.forward_head(tokens), model.forward_head(tokens, pre_logits=True)
    logits, features = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in outputs)
    return Branch(logits, features, tokens)


class _MethodStates:
    """Observer that keeps the method's state after each block, pass by pass, of its own thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._passes: list[list[Any]] = []

    @torch.compiler.disable
    def record(self, index: int, x: Tensor, output: BlockOutput) -> None:
        if threading.get_ident() != self._thread:
            return
        if index == 0:
            self._passes.append([])
        self._passes[-1].append(output.method_state)

    def of_pass(self, index: int) -> tuple[Any, ...]:
        """One state per block; empty for a model that is not fused."""
        return tuple(self._passes[index]) if self._passes else ()


@contextmanager
def _both_schedules(stack: FusedStack, lighter: Sequence[Amount]) -> Iterator[None]:
    """While open, a call of the stack in this thread returns 2B rows: by its own schedule, then by `lighter`."""
    thread = threading.get_ident()

    def add_lighter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        if threading.get_ident() != thread:
            return output
        second = stack.forward(*args, schedule=lighter, **kwargs)
        tokens = max(output.shape[1], second.shape[1])
        return torch.cat([_repeat_last(output, tokens), _repeat_last(second, tokens)])

    handle = stack.register_forward_hook(add_lighter, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _repeat_last(x: Tensor, tokens: int) -> Tensor:
    """B M C -> B `tokens` C by repeating the last token.

    Duplicates are harmless: a stack returns fused tokens only to a head that does not depend on how often one occurs.
    """
    missing = tokens - x.shape[1]
    return x if missing == 0 else torch.cat([x, x[:, -1:].expand(-1, missing, -1)], dim=1)


@contextmanager
def _set_r(stack: FusedStack, r: ReductionSpec) -> Iterator[None]:
    """Another r for whole passes of a host that iterates over its blocks."""
    before = stack.r
    stack.set_r(r)
    try:
        yield
    finally:
        stack.set_r(before)
