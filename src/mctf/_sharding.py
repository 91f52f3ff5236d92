"""Blocks sharded by FSDP2: a fused pass runs inside a call of the block, whose hooks gather and free its parameters.

`fully_shard(block)` changes the class of a block and adds hooks to its call: parameters are gathered before the forward
pass and freed after it; hooks on the output and on the input gather them for the backward pass and reduce gradients. A
fused stack calls the parts of a block, not the block, so the hooks would not run.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .methods.base import BlockOutput


def is_sharded(block: nn.Module) -> bool:
    """Whether `fully_shard` was called on this block."""
    return any(cls.__name__ == "FSDPModule" for cls in type(block).__mro__)


def run_in_call(block: Any, run: Callable[[Tensor], BlockOutput], x: Tensor) -> BlockOutput:
    """`run(x)`, for a sharded block inside a call of it; only one thread may run a sharded model."""
    if not is_sharded(block) or "forward" in vars(block):  # layers of transformers are called by their host
        return run(x)
    outputs: list[BlockOutput] = []

    def forward(x: Tensor) -> Tensor:
        vars(block).pop("forward")  # a host may call the block itself inside, where nothing is fused
        outputs.append(run(x))
        return outputs[0].x

    block.forward = forward
    try:
        x = block(x)
    finally:
        vars(block).pop("forward", None)
    return replace(outputs[0], x=x)
