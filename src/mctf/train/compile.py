"""torch.compile for training, block by block.

r' changes in every step, and so does the number of tokens in every block. A model compiled as a whole would be
compiled once for each r'. A single block is compiled with r and the number of tokens as variables: all blocks and all
r' then share a handful of graphs (one without fusing, one for the first fusion, one for the later ones, and a few
that the compiler adds for 0 and 1).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..hosts import find_host
from ..methods.base import BlockContext, BlockOps, BlockOutput, Method
from ..stack import FusedStack

_GRAPHS = 256  # blocks that differ in a number, as in their drop-path rate, are compiled one by one


class CompiledMethod:
    """A method whose `run` is compiled; all else is the method's own."""

    def __init__(self, method: Method, *, backend: str | Callable[..., Any]) -> None:
        self._method = method
        self._run = torch.compile(method.run, backend=backend)

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        return self._run(block, x, sizes, ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_method"], name)

    def __repr__(self) -> str:
        return f"compiled {self._method}"


def _avoid_mixed_reductions() -> None:
    """Torch 2.11 writes code that fails where rows and columns are summed in one kernel and their number varies."""
    from torch._inductor import config  # slow to load, and needed by a run that compiles only

    if hasattr(config.triton, "mix_order_reduction"):
        config.triton.mix_order_reduction = False


def compile_blocks(model: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the blocks of a plain or fused model, in place; mctf.unfuse gives plain blocks back."""
    _avoid_mixed_reductions()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    container: Any = find_host(model).container
    if isinstance(container, FusedStack):
        container.method = CompiledMethod(container.method, backend=backend)  # type: ignore[assignment]
        return
    for block in container.children():
        block.compile(backend=backend)
