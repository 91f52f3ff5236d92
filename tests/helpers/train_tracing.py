"""Graphs of the GPU path, traced without a GPU: the compiler traces the kernels, and nothing is executed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch.utils._pytree import tree_leaves

from mctf import kernels


class FakeDriver:
    """The part of a GPU driver that Triton needs to trace kernels."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # here, for tests that are skipped where Triton is missing

        return GPUTarget("cuda", 90, 32)


def pretend_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let CPU tensors take the path of the kernels."""
    from triton.runtime import driver

    # reset_active, which undoes set_active, needs a real GPU
    patch.setattr(driver, "_active", FakeDriver())
    patch.setattr(kernels, "use_kernels", lambda x: x.dtype in kernels._DTYPES)


class Graphs:
    """A backend of torch.compile that counts graphs and collects kernel names; compiled graphs return zeros."""

    def __init__(self) -> None:
        self.forward = self.backward = 0
        self.kernels: set[str] = set()
        forward = self._compile_forward
        self.backend = aot_autograd(fw_compiler=forward, bw_compiler=self._compile_backward, inference_compiler=forward)

    def _compile_forward(self, module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.forward += 1
        return self._compile(module.graph)

    def _compile_backward(self, module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.backward += 1
        return self._compile(module.graph)

    def _compile(self, graph: fx.Graph) -> Callable[..., Any]:
        self.kernels |= kernels_in(graph)
        return make_boxed_func(lambda *arguments: zeros(graph, arguments))


def kernels_in(graph: fx.Graph) -> set[str]:
    indices = [node.kwargs["kernel_idx"] for node in graph.nodes if "kernel_idx" in node.kwargs]
    launched: list[Any] = [kernel_side_table.get_kernel(index) for index in indices]
    return {kernel.fn.__name__ for kernel in launched}


def zeros(graph: fx.Graph, arguments: tuple[Any, ...]) -> list[Any]:
    """Outputs of the graph for these arguments, with zeros for all values."""
    numbers: dict[Any, int] = {}
    for node, argument in zip(graph.find_nodes(op="placeholder"), arguments, strict=True):
        numbers |= numbers_of(node.meta["val"], argument)
    (output,) = graph.find_nodes(op="output")
    leaves = tree_leaves(output.args)
    return [zero(leaf.meta["val"], numbers) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]


def numbers_of(recorded: Any, argument: Any) -> dict[Any, int]:
    """The value of each symbolic size of a recorded input in an argument."""
    if isinstance(recorded, Tensor):
        pairs = zip((*recorded.shape, *recorded.stride()), (*argument.shape, *argument.stride()), strict=True)
    else:
        pairs = zip([recorded], [argument], strict=True)
    return {variable.node.expr: number for variable, number in pairs if isinstance(variable, torch.SymInt)}


def zero(recorded: Any, numbers: dict[Any, int]) -> Any:
    """A recorded output, with values for its symbolic sizes."""

    def number(size: Any) -> Any:
        return int(size.node.expr.subs(numbers)) if isinstance(size, torch.SymInt) else size

    if not isinstance(recorded, Tensor):
        return number(recorded)
    shape, strides = ([number(size) for size in sizes] for sizes in (recorded.shape, recorded.stride()))
    return torch.empty_strided(shape, strides, dtype=recorded.dtype).zero_()
