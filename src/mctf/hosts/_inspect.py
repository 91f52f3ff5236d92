"""Helpers of all hosts for modules of other libraries: check them, slice them, count their multiply-adds."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.flop_counter import FlopCounterMode

from .._sharding import is_sharded
from ..core.flops import NORM
from ..errors import MctfError, shown
from ..kernels.quantized_linear import QuantizedLinear

BATCH_NORM = 2  # fvcore's cost per element, in evaluation


def check_model(model: object) -> None:
    """Raise MctfError for anything but a module, such as a model's name or class."""
    if isinstance(model, nn.Module):
        return
    cure = "pass the model itself"
    if isinstance(model, str):
        cure = f"create the model first, for example by timm.create_model({shown(model)})"
    raise MctfError(f"expected a torch.nn.Module, got {type(model).__name__}: {cure}")


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def check_unsharded(name: str, block: nn.Module) -> None:
    """Raise MctfError for a block that FSDP2 has sharded, whose class and hooks are no longer the library's."""
    if is_sharded(block):
        raise MctfError(f"{name} is sharded by FSDP2: run mctf.fuse first, then fully_shard on the blocks")


def check_whole(name: str, module: nn.Module) -> None:
    """Raise MctfError for a module with hooks or a replaced forward: a fused model does not call it as a whole."""
    if has_hooks(module):
        raise MctfError(f"{name} has hooks, which would not fire in a fused model: remove them first")
    if "forward" in vars(module):
        raise MctfError(f"{name}.forward was replaced, and would not be called in a fused model: restore it first")


def linear_slice(linear: nn.Module, h: Tensor, start: int, stop: int) -> Tensor:
    """Output channels start .. stop of a linear layer; the others are not computed where that is safe.

    Anything but a bare nn.Linear or one of `mctf.quantize` (adapters, parametrized layers, hooks) is called whole.
    """
    if isinstance(linear, QuantizedLinear) and not has_hooks(linear):
        return linear.rows(h, start, stop)
    if (start, stop) == (0, getattr(linear, "out_features", None)):
        return linear(h)  # a slice of all rows hides the weight from converters, which then do not quantize it
    if type(linear) is nn.Linear and not has_hooks(linear) and can_slice(linear.weight):
        bias = None if linear.bias is None else linear.bias[start:stop]
        return F.linear(h, linear.weight[start:stop], bias)
    return linear(h)[..., start:stop]


def can_slice(weight: Tensor) -> bool:
    """Whether rows of a weight can be taken by slicing: quantized weights (torchao) wrap several tensors of their own.

    They slice too, but not under torch.inference_mode.
    """
    return not is_traceable_wrapper_subclass(weight)


def macs_per_token(*modules: nn.Module | None) -> int:
    """Multiply-adds of the linear layers and LayerNorms inside these modules for one token."""
    parts = [part for module in modules if module is not None for part in module.modules()]
    linear = sum(part.in_features * part.out_features for part in parts if isinstance(part, nn.Linear))
    return linear + NORM * sum(math.prod(part.normalized_shape) for part in parts if isinstance(part, nn.LayerNorm))


def count_on_meta(module: nn.Module, run: Callable[[Any], Any]) -> tuple[Any, int]:
    """The result of `run` on a copy of the module on the meta device, and its multiply-adds by fvcore's convention."""
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
