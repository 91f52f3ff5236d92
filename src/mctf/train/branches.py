"""A model's answers to one batch, with its own r and, beside that, with another.

Both branches have the same weights and the same patch embedding. Where the host calls its stack of blocks, it runs
once: the stack takes the embedded patches twice, and hands both results, one below the other, to the host's own
norm and head. A host that loops over its blocks (or has gradient checkpointing on) runs twice.

Axes: B images, K classes, N tokens, C channels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..api import fused_stack
from ..core.schedule import ReductionSpec
from ..stack import FusedStack


@dataclass(frozen=True)
class Branch:
    """What a model says of a batch, in float32 or wider.

    logits: B K. features: B C, what its classifier reads: the class token after the final norm; in a model without
    class token the pooled tokens, in one with a distillation token the mean of both tokens.
    """

    logits: Tensor
    features: Tensor


def run_branch(model: nn.Module, images: Tensor) -> Branch:
    """The model as it is, on images B 3 H W."""
    return _read(model, model.forward_features(images))  # type: ignore[operator]


def run_branches(model: nn.Module, images: Tensor, lighter: ReductionSpec) -> tuple[Branch, Branch]:
    """A fused model with its own r, and with `lighter` in its place."""
    with _running_twice(fused_stack(model), lighter):
        both = _read(model, model.forward_features(images))  # type: ignore[operator]
    if len(both.logits) > len(images):
        logits, features = both.logits.chunk(2), both.features.chunk(2)
        return Branch(logits[0], features[0]), Branch(logits[1], features[1])
    with _set(fused_stack(model), lighter):
        return both, run_branch(model, images)


def _read(model: Any, tokens: Tensor) -> Branch:
    return Branch(_wide(model.forward_head(tokens)), _wide(model.forward_head(tokens, pre_logits=True)))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
