"""The r that brings a method to a target cost, so that methods can be compared at equal FLOPs.

Every method acts in its own default blocks and is swept over r (`core/budget.py`).

The cost is that of the plan, and nothing is run. Where each image decides, the cost is the mean over a sample of images
that are run, and r is the same in all blocks. Some of these methods decide by learned layers alone: their cost does not
depend on r, so there is no sweep and they keep the cost they have.

Axes: B images, 3 H W.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from ..api import fuse
from ..core.budget import ReductionSweep, reduction_steps
from ..core.schedule import ReductionSpec
from ..hosts import find_host
from ..methods import make_method
from ..models.loading import copy_sharing_weights
from ..planning import Plan, plan
from .adaptive_flops import count_tokens, measured_cost

_BATCH = 32


def sweep_reductions(
    model: nn.Module, method: str, *, images: Tensor, trim_last: bool | None = None
) -> ReductionSweep | None:
    """The sweep of a method over r on an unfused model; None where the cost does not depend on r.

    images: B 3 H W, on the device and in the dtype of the model; the cost is for their size, or measured on them.
    trim_last: as for `mctf.fuse`. Raises MctfError where the method does not support the model.
    """
    architecture = find_host(model).architecture((images.shape[2], images.shape[3]))

    @cache
    def planned(r: ReductionSpec | None) -> Plan:
        return plan(model, method=method, r=r, trim_last=trim_last, architecture=architecture)

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
    depth = len(default.reductions)
    blocks = sorted(make_method(method, {}).default_blocks(depth))
    steps = reduction_steps(default.r, blocks=blocks, depth=depth, tokens=default.image_tokens)
    return ReductionSweep(method, steps, lambda r: planned(r).gflops)
