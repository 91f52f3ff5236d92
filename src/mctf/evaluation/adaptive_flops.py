"""Tokens and FLOPs measured on images, for methods under which each image decides how many tokens remain.

Each image counts with its own tokens. Padding, which a batch of images with different counts also computes, is not
counted: a single image has none.

Axes: B images, 3 H W, L blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean

import torch
from torch import Tensor, nn

from ..api import fused_stack
from ..core.schedule import Reduction
from ..errors import MctfError
from ..hosts import Architecture, find_host
from ..planning import block_costs, whole_cost
from ..tracing import trace


@dataclass(frozen=True)
class MeasuredCost:
    """Means over images. token_counts: tokens after each block. gflops, gflops_run: as in `Plan`."""

    token_counts: tuple[float, ...]
    gflops: float
    gflops_run: float


def mean_tokens(model: nn.Module, batches: Iterable[Tensor]) -> MeasuredCost:
    """Tokens and GFLOPs of a fused model on batches of images (B 3 H W) of one size, on the model's device."""
    counts, size = [], None
    for pixels in batches:
        size = (pixels.shape[2], pixels.shape[3])
        counts.append(count_tokens(model, pixels))
    if size is None:
        raise MctfError("there are no images to count the tokens of: give at least one batch")
    return measured_cost(model, torch.cat(counts), find_host(model).architecture(size))


@torch.inference_mode()
def count_tokens(model: nn.Module, pixels: Tensor) -> Tensor:
    """Tokens of each image before the first block of a fused model and after each block: B L+1, on the CPU."""
    with trace(model) as traced:
        model(pixels)
    before = torch.full((len(pixels),), traced.blocks[0].assignment.slots.shape[1])
    after = [(block.sizes > 0).sum(dim=1).cpu() for block in traced.blocks]
    return torch.stack([before, *after], dim=1)


def measured_cost(model: nn.Module, counts: Tensor, architecture: Architecture) -> MeasuredCost:
    """Means for a fused model from the counts of `count_tokens`; the cost is averaged over images, not over counts.

    architecture: of the unfused model at the size of these images.
    """
    stack = fused_stack(model)
    if stack.dense:
        architecture = replace(architecture, reads_every_token=True)
    costs = []
    for row in counts.tolist():
        steps = [Reduction(before, before - after, before - after, after) for before, after in pairwise(row)]
        output_tokens = row[0] if architecture.reads_every_token or stack.method.restores_tokens else row[-1]
        blocks = block_costs(architecture, stack.method, stack.schedule, steps)
        costs.append(whole_cost(architecture, blocks, output_tokens))
    return MeasuredCost(
        token_counts=tuple(counts[:, 1:].double().mean(dim=0).tolist()),
        gflops=mean(cost.paper for cost in costs) / 1e9,
        gflops_run=mean(cost.run for cost in costs) / 1e9,
    )
