"""What a method costs under which each image decides how many tokens remain, measured on images.

Each image is counted by the tokens it has itself. Padding, which a batch of unlike images computes as well, is left
out: an image alone has none.

Axes: B images, 3 H W, L blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean

import torch
from torch import Tensor, nn

from ..api import fused_stack
from ..core.flops import Cost
from ..core.schedule import Reduction
from ..errors import MctfError
from ..hosts import Architecture, find_host
from ..planning import block_costs, whole_cost
from ..stack import FusedStack
from ..tracing import trace


@dataclass(frozen=True)
class Measured:
    """Means over images. token_counts: tokens leaving each block. gflops, gflops_run: as in `Plan`."""

    images: int
    token_counts: tuple[float, ...]
    gflops: float
    gflops_run: float


def mean_tokens(model: nn.Module, batches: Iterable[Tensor]) -> Measured:
    """Tokens and GFLOPs of a fused model on batches of images (B 3 H W) of one size, where the model is."""
    counts, size = [], None
    for pixels in batches:
        size = (pixels.shape[2], pixels.shape[3])
        counts.append(count_tokens(model, pixels))
    if size is None:
        raise MctfError("there are no images to count the tokens of: give at least one batch")
    return summarise(model, torch.cat(counts), image_size=size)


@torch.inference_mode()
def count_tokens(model: nn.Module, pixels: Tensor) -> Tensor:
    """Tokens of each image that enter the first block of a fused model and leave each block: B L+1, on the CPU."""
    with trace(model) as watched:
        model(pixels)
    entering = torch.full((len(pixels),), watched.blocks[0].assignment.slots.shape[1])
    leaving = [(block.sizes > 0).sum(dim=1).cpu() for block in watched.blocks]
    return torch.stack([entering, *leaving], dim=1)


def summarise(model: nn.Module, counts: Tensor, *, image_size: tuple[int, int]) -> Measured:
    """The means of a fused model whose images were counted by `count_tokens`; the cost is a mean over images too."""
    stack = fused_stack(model)
    architecture = find_host(model).architecture(image_size)
    if stack.dense:
        architecture = replace(architecture, reads_every_token=True)
    costs = [_cost(architecture, stack, row) for row in counts.tolist()]
    return Measured(
        images=len(counts),
        token_counts=tuple(counts[:, 1:].double().mean(dim=0).tolist()),
        gflops=mean(cost.paper for cost in costs) / 1e9,
        gflops_run=mean(cost.run for cost in costs) / 1e9,
    )


def _cost(architecture: Architecture, stack: FusedStack, counts: list[int]) -> Cost:
    """Multiply-adds of one image with these tokens before the first block and after each."""
    steps = [
        Reduction(entering, entering - leaving, entering - leaving, leaving) for entering, leaving in pairwise(counts)
    ]
    gives_every_token = stack.method.restores_tokens
    left = counts[0] if architecture.reads_every_token or gives_every_token else counts[-1]
    return whole_cost(architecture, block_costs(architecture, stack.method, stack.schedule, steps), left)
