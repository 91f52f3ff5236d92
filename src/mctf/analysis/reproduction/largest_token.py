"""How large the largest token gets, with and without the criterion of size (paper, section 4.3, Figure 9).

Axes: B images.
"""

import torch
from torch import Tensor, nn

from ...api import fuse
from ...models.sharing import copy_sharing_weights
from ...tracing import trace
from .criteria import ALL, options_of
from .experiment import Experiment, Result, Task
from .studies import R

CASES = {"with_size": ALL, "without_size": "sim+info"}


class LargestToken(Experiment):
    """One number an image and case: how many input tokens the largest token stands for after the last block."""

    name = "largest_token"
    title = "How large tokens get"
    measures = f"Size of the largest token after the last block, with and without the size criterion, r = {R}."
    sources = ("Figure 9",)

    def steps(self, task: Task) -> int:
        return len(task.seen.batches) * len(CASES)

    @torch.inference_mode()
    def run(self, task: Task) -> Result:
        model = task.seen.model
        fused = {case: fuse(copy_sharing_weights(model), r=R, **options_of(name)) for case, name in CASES.items()}
        sizes: dict[str, list[int]] = {case: [] for case in CASES}
        for batch in task.batches(len(CASES)):
            pixels = task.seen.to_model(batch.pixels)
            for case, each in fused.items():
                sizes[case] += largest(each.eval(), pixels).tolist()
        return {"images": len(task.seen), "r": R, "sizes": sizes}


def largest(model: nn.Module, pixels: Tensor) -> Tensor:
    """Size of the largest token of each image after the last block of a fused model: B, int64."""
    with trace(model) as watched:
        model(pixels)
    return watched.blocks[-1].sizes.amax(dim=1).round().long().cpu()
