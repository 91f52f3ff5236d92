"""What hosts of every library do with modules: look at them, refuse them, slice them, count them."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..core.flops import NORM
from ..errors import MctfError

BATCH_NORM = 2  # fvcore's price of one element, in evaluation


def check_model(model: object) -> None:
    """Refuse what is no model, but the name or the class of one, or nothing at all."""
    if isinstance(model, nn.Module):
        return
    cure = "pass the model itself"
    if isinstance(model, str):
        cure = f"make the model first, as by timm.create_model({model!r})"
    raise MctfError(f"expected a torch.nn.Module, got {type(model).__name__}: {cure}")


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def check_whole(name: str, module: nn.Module) -> None:
    """Refuse a module that someone wants called as a whole: in a fused model it is not."""
    if has_hooks(module):
        raise MctfError(f"{name} has hooks, which would not fire in a fused model: remove them first")
    if "forward" in vars(module):
        raise MctfError(f"{name}.forward was replaced, and would not be called in a fused model: restore it first")


def part_of(linear: nn.Module, h: Tensor, start: int, stop: int) -> Tensor:
    """Output channels start .. stop of a linear layer, computing no others where that is safe.

    Anything but a bare nn.Linear (adapters, quantised or parametrised layers, hooks) is called whole.
    """
    if type(linear) is nn.Linear and not has_hooks(linear):
        bias = None if linear.bias is None else linear.bias[start:stop]
        return F.linear(h, linear.weight[start:stop], bias)
    return linear(h)[..., start:stop]


def macs_per_token(*modules: nn.Module | None) -> int:
    """Multiply-adds of the linear layers and LayerNorms inside these modules for one token."""
    parts = [part for module in modules if module is not None for part in module.modules()]
    linear = sum(part.in_features * part.out_features for part in parts if isinstance(part, nn.Linear))
    return linear + NORM * sum(math.prod(part.normalized_shape) for part in parts if isinstance(part, nn.LayerNorm))


def run_on_shapes(module: nn.Module, run: Callable[[Any], Any]) -> tuple[Any, int]:
    """What `run` gives for a copy of the module without memory, and its multiply-adds in fvcore's convention."""
    empty = copy.deepcopy(module).to("meta", torch.float32)
    norms = 0

    def count(norm: nn.Module, _: Any, output: Tensor) -> None:
        nonlocal norms
        norms += output.numel() * (BATCH_NORM if isinstance(norm, nn.BatchNorm2d) else NORM)

    for part in empty.modules():
        if isinstance(part, (nn.LayerNorm, nn.BatchNorm2d, nn.GroupNorm)):
            part.register_forward_hook(count)
    with FlopCounterMode(display=False) as counter:
        result = run(empty)
    return result, counter.get_total_flops() // 2 + norms
