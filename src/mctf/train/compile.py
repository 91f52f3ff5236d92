"""torch.compile for training, block by block.

r' changes in every step, and with it the number of tokens in every block. A model compiled as a whole would recompile
for each r'. A single block is compiled with r and the number of tokens as variables, so all blocks and all r' share at
most eight graphs: without fusion, the first fusion, later fusions, and specializations for 0 and 1.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..hosts import find_host
from ..methods.base import BlockContext, BlockOps, BlockOutput, Method
from ..stack import FusedStack

_MAX_GRAPHS = 256  # blocks that differ in a constant, as in their drop-path rate, have graphs of their own


class CompiledMethod:
    """A method whose `run` is compiled; other attributes are those of the method."""

    def __init__(self, method: Method, *, backend: str | Callable[..., Any]) -> None:
        self._method = method
        self._run = torch.compile(method.run, backend=backend)

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        return self._run(block, x, sizes, ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_method"], name)

    def __repr__(self) -> str:
        return f"compiled {self._method}"


def compile_blocks(model: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the blocks of a fused or unfused model, in place; mctf.unfuse restores uncompiled blocks."""
    from torch._inductor import config  # slow to import, needed only by runs that compile

    if hasattr(config.triton, "mix_order_reduction"):
        # torch 2.11 generates invalid code for row and column sums in one kernel under dynamic shapes
        config.triton.mix_order_reduction = False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_GRAPHS)
    container: Any = find_host(model).container
    if isinstance(container, FusedStack):
        container.method = CompiledMethod(container.method, backend=backend)  # type: ignore[assignment]
        return
    for block in container.children():
        block.compile(backend=backend)
