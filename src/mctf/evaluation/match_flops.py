"""The r that brings a method to a target cost, so that methods can be compared at equal FLOPs.

Every method acts in its own default blocks and is swept over r, from the most to the least expensive setting. A method
whose default r is a count reduces a little in every block: one step of the sweep is one more token in one block, the
first blocks first. A method whose default r is a ratio reduces much in a few blocks: one step is a thousandth. The step
closest to the target is chosen, above or below; steps are so fine that neither side has an advantage.

The cost is that of the plan, and nothing is run. Where each image decides, the cost is the mean over a sample of images
that are run, and r is the same in all blocks. Some of these methods decide by learned layers alone: their cost does not
depend on r, so there is no sweep and they keep the cost they have.

Axes: B images, 3 H W.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from ..api import fuse
from ..core.schedule import ReductionSpec
from ..errors import MctfError
from ..hosts import find_host
from ..methods import make_method
from ..models.loading import copy_sharing_weights
from ..planning import Plan, plan
from .adaptive_flops import count_tokens, measured_cost

_RATIOS = tuple(thousandths / 1000 for thousandths in range(1, 1000))
_BATCH = 32


@dataclass(frozen=True)
class ReductionSweep:
    """Settings of a method on one model. reductions: r from the most to the least expensive. gflops: cost of an r."""

    method: str
    reductions: Sequence[ReductionSpec]
    gflops: Callable[[ReductionSpec], float]

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest cost."""
        return self.gflops(self.reductions[-1]), self.gflops(self.reductions[0])

    def closest(self, target: float) -> ReductionSpec:
        """The r whose cost is closest to the target (GFLOPs); raises MctfError for a target out of bounds."""
        low, high = self.bounds
        if not low <= target <= high:
            raise MctfError(
                f"{self.method} cannot cost {target:g} GFLOPs on this model: use a target from {low:.3f} to {high:.3f}"
            )
        index = bisect_left(self.reductions, -target, key=lambda r: -self.gflops(r))
        return min(self.reductions[max(0, index - 1) : index + 1], key=lambda r: abs(self.gflops(r) - target))


def sweep_reductions(model: nn.Module, method: str, *, images: Tensor) -> ReductionSweep | None:
    """The sweep of a method over r on an unfused model; None where the cost does not depend on r.

    images: B 3 H W, on the device and in the dtype of the model; the cost is for their size, or measured on them.
    Raises MctfError where the method does not support the model.
    """
    architecture = find_host(model).architecture((images.shape[2], images.shape[3]))

    @cache
    def planned(r: ReductionSpec | None) -> Plan:
        return plan(model, method=method, r=r, architecture=architecture)

    @cache
    def measured(r: ReductionSpec) -> float:
        fused = fuse(copy_sharing_weights(model), method, r=r).eval()
        counts = torch.cat([count_tokens(fused, batch) for batch in images.split(_BATCH)])
        return measured_cost(fused, counts, architecture).gflops

    default = planned(None)
    if default.adaptive:
        reductions: Sequence[ReductionSpec] = range(1, default.image_tokens)
        if planned(reductions[0]).gflops == planned(reductions[-1]).gflops:
            return None
        return ReductionSweep(method, reductions, measured)
    if isinstance(default.r, float):
        reductions = _RATIOS
    else:
        depth = len(default.reductions)
        blocks = sorted(make_method(method, {}).default_blocks(depth))
        most = max(1, default.image_tokens // 2)  # no block merges more than half of its tokens
        reductions = [_distribute(tokens, blocks, depth) for tokens in range(1, most * len(blocks) + 1)]
    return ReductionSweep(method, reductions, lambda r: planned(r).gflops)


def _distribute(tokens: int, blocks: Sequence[int], depth: int) -> ReductionSpec:
    """`tokens` in total, evenly over the blocks, the remainder to the first ones; one number where it divides."""
    each, remainder = divmod(tokens, len(blocks))
    if remainder == 0:
        return each
    more = set(blocks[:remainder])
    return tuple((each + (block in more) if block in blocks else 0) for block in range(depth))
