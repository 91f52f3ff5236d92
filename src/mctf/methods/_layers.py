"""The learned layers of a method: created when a model is fused, stashed while it is not.

In a fused model they are the module `token_reduction`, by block number, and in its state_dict under that prefix. A
weights file may hold such layers for a model that is not fused yet: they are stashed in an attribute of the model,
which copies keep, until `mctf.fuse` loads them.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..core.flops import BlockShape
from ..core.schedule import Amount
from ..errors import MctfError
from .base import Method

LAYERS = "token_reduction"
_PREFIX = f"{LAYERS}."
_STASH = "_learned_layers"


class UntrainedWarning(UserWarning):
    """A learned method runs with untrained layers."""


def split_state_dict(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A state_dict in two: the model's own entries, and the learned layers of a method, by their full names."""
    layers = {name: value for name, value in state.items() if name.startswith(_PREFIX)}
    return {name: value for name, value in state.items() if name not in layers}, layers


def stash_layers(model: nn.Module, layers: Mapping[str, Tensor]) -> None:
    """Keep these layers, by their full names, for the next `mctf.fuse` of the model."""
    setattr(model, _STASH, dict(layers))


def stashed_layers(model: nn.Module) -> dict[str, Tensor]:
    """The stashed layers, by their full names; empty where there are none."""
    return getattr(model, _STASH, {})


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict of a model, with its stashed layers."""
    return {**stashed_layers(model), **model.state_dict()}


def make_layers(
    model: nn.Module, method: Method, shapes: Sequence[BlockShape], schedule: Sequence[Amount]
) -> nn.ModuleDict | None:
    """The method's learned layers on the model's device and in its dtype, loaded from the stash where there is one.

    Fresh values are drawn from torch's generator on the CPU, whose state does not change.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        layers = method.make_layers(shapes, schedule)
    if not layers:
        return None
    weight = next(model.parameters())
    layers = layers.to(weight.device, weight.dtype).train(model.training)
    stashed = stashed_layers(model)
    if not stashed:
        message = f"the layers of {method.name} are untrained: load the weights of a model that was fine-tuned with it"
        warnings.warn(message, UntrainedWarning, stacklevel=4)  # the caller of mctf.fuse
        return layers
    wanted = layers.state_dict()
    for name, value in wanted.items():
        stored = stashed.get(_PREFIX + name)
        if stored is None or stored.shape != value.shape:
            problem = "lack" if stored is None else f"are {tuple(stored.shape)}, not {tuple(value.shape)}, in"
            raise MctfError(
                f"the weights hold layers of another method than {method.name}, or of other blocks (they {problem} "
                f"{_PREFIX}{name}): fuse as they were trained"
            )
    layers.load_state_dict({name: stashed[_PREFIX + name] for name in wanted})
    return layers
