"""The layers that a method has learned: made when a model is fused, kept aside while it is not.

In a fused model they are the module `token_reduction`, by block number, and in its state_dict under that prefix. A
file of weights may hold such layers for a model that nobody has fused yet: they are kept aside in an attribute of the
model, which copies take along, until `mctf.fuse` asks for them.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..core.schedule import Amount
from ..errors import MctfError
from ..hosts import Host
from .base import Method

LAYERS = "token_reduction"
_PREFIX = f"{LAYERS}."
_ASIDE = "_learned_layers"


class UntrainedWarning(UserWarning):
    """A method that is learned runs with layers that nobody has trained."""


def split_state_dict(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A state_dict in two: what belongs to the model itself, and the layers of a method, by their full names."""
    layers = {name: value for name, value in state.items() if name.startswith(_PREFIX)}
    return {name: value for name, value in state.items() if name not in layers}, layers


def stash_layers(model: nn.Module, layers: Mapping[str, Tensor]) -> None:
    """Have `mctf.fuse` give these layers, by their full names, to the method that it fuses the model with."""
    setattr(model, _ASIDE, dict(layers))


def stashed_layers(model: nn.Module) -> dict[str, Tensor]:
    """The layers kept aside, by their full names; empty where there are none."""
    return getattr(model, _ASIDE, {})


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict of a model, with the layers kept aside."""
    return {**stashed_layers(model), **model.state_dict()}


def make_layers(model: nn.Module, host: Host, method: Method, schedule: Sequence[Amount]) -> nn.ModuleDict | None:
    """The method's own layers, on the model's device and in its dtype; with the values kept aside where there are any.

    Values that nobody trained follow from torch's generator, which is left as it was.
    """
    if type(method).make_layers is Method.make_layers:
        return None
    with torch.random.fork_rng(devices=[]):
        layers = method.make_layers(host.architecture(None).blocks, schedule)
    if not layers:
        return None
    weight = next(model.parameters())
    layers = layers.to(weight.device, weight.dtype).train(model.training)
    known = stashed_layers(model)
    if known:
        _load(layers, known, method)
    else:
        warnings.warn(
            f"the layers of {method.name} are untrained: load the weights of a model that was fine-tuned with it",
            UntrainedWarning,
            stacklevel=3,
        )
    return layers


def _load(layers: nn.ModuleDict, known: Mapping[str, Tensor], method: Method) -> None:
    """Fill the layers; raises MctfError where the values are not theirs."""
    wanted = layers.state_dict()
    for name, value in wanted.items():
        found = known.get(_PREFIX + name)
        if found is None or found.shape != value.shape:
            problem = "lack" if found is None else f"are {tuple(found.shape)}, not {tuple(value.shape)}, in"
            raise MctfError(
                f"the weights hold layers of another method than {method.name}, or of other blocks (they {problem} "
                f"{_PREFIX}{name}): fuse as they were trained"
            )
    layers.load_state_dict({name: known[_PREFIX + name] for name in wanted})
