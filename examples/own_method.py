"""A token-reduction method of one's own in fifteen lines: drop the tokens whose values are smallest.

    python examples/own_method.py

Only `run` is required. `mctf.fuse`, `plan`, `trace`, pictures and every command then take the name "low_norm".
"""

from typing import ClassVar

import timm
import torch
from torch import Tensor

import mctf
from mctf.methods import BlockContext, BlockOps, BlockOutput, Method, keep_topk


@mctf.register_method
class LowNorm(Method):
    """Drops the r tokens with the smallest values before each block."""

    name: ClassVar[str] = "low_norm"
    summary: ClassVar[str] = "Drops tokens with small values"
    drops: ClassVar[bool] = True

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        if ctx.r == 0:
            return BlockOutput(block.plain(x), sizes)
        norms = block.values(block.norm1(x)).norm(dim=-1)[:, ctx.protected :]
        kept = keep_topk(norms, norms.shape[1] - ctx.r, protected=ctx.protected)
        block = block.fused(kept.assignment, kept.weights)  # positions and biases follow the kept tokens
        return BlockOutput(block.plain(kept.gather(x)), sizes, kept.assignment, kept.weights)


if __name__ == "__main__":
    model = timm.create_model("test_vit").eval()
    print(mctf.plan(model, method="low_norm", r=4))
    mctf.fuse(model, "low_norm", r=4)
    with torch.no_grad(), mctf.trace(model) as trace:
        model(torch.randn(2, 3, 160, 160))
    print("tokens per block:", trace.token_counts)
