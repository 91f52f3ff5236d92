"""The r that brings a method to a wanted cost, so that methods can be compared at one and the same.

Every method acts in its own default blocks and is moved along a ladder of r, from the dearest to the cheapest. Whose
default r is a count takes a little in every block: a rung is one more token in one block, the first blocks first. Whose
default r is a ratio takes much in a few blocks: a rung is a thousandth. The rung nearest to the wanted cost is taken,
be it above or below; rungs lie so close that neither side gains by that.

The cost is that of the plan, and nothing is run. Where each image decides, it is the mean over a sample of images that
are run, and r is the same in all blocks. Some of these methods decide by what they have learned alone: r does not move
them, they have no ladder and keep the cost that is their own.

Axes: B images, 3 H W.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn

from ..api import fuse
from ..core.schedule import ReductionSpec
from ..errors import MctfError
from ..methods import make_method
from ..models.loading import copy_sharing_weights
from ..planning import Plan, plan
from .adaptive_flops import mean_tokens

_RATIOS = tuple(thousandths / 1000 for thousandths in range(1, 1000))
_BATCH = 32


@dataclass(frozen=True)
class Ladder:
    """Settings of a method on one model. rungs: from the dearest to the cheapest. cost: GFLOPs of a rung."""

    method: str
    rungs: Sequence[ReductionSpec]
    cost: Callable[[ReductionSpec], float]

    @property
    def reach(self) -> tuple[float, float]:
        """The lowest and the highest cost."""
        return self.cost(self.rungs[-1]), self.cost(self.rungs[0])

    def nearest(self, gflops: float) -> ReductionSpec:
        """The r whose cost is nearest to this; raises MctfError where that is out of reach."""
        low, high = self.reach
        if not low <= gflops <= high:
            raise MctfError(
                f"{self.method} cannot cost {gflops:g} GFLOPs on this model: name a cost from {low:.3f} to {high:.3f}"
            )
        place = bisect_left(self.rungs, -gflops, key=lambda rung: -self.cost(rung))
        return min(self.rungs[max(0, place - 1) : place + 1], key=lambda rung: abs(self.cost(rung) - gflops))


def find_ladder(model: nn.Module, method: str, *, images: Tensor) -> Ladder | None:
    """The ladder of a method on an unfused model; None where r does not move it.

    images: B 3 H W, where and as the model is; the cost is that of their size, or measured on them.
    Raises MctfError where the method does not suit the model.
    """
    size = (images.shape[2], images.shape[3])

    @cache
    def planned(r: ReductionSpec | None) -> Plan:
        return plan(model, method=method, r=r, image_size=size)

    @cache
    def measured(r: ReductionSpec) -> float:
        fused = fuse(copy_sharing_weights(model), method, r=r).eval()
        return mean_tokens(fused, images.split(_BATCH)).gflops

    usual = planned(None)
    rungs = _rungs(usual)
    if not usual.adaptive:
        return Ladder(method, rungs, lambda r: planned(r).gflops)
    if planned(rungs[0]).gflops == planned(rungs[-1]).gflops:
        return None
    return Ladder(method, rungs, measured)


def _rungs(usual: Plan) -> Sequence[ReductionSpec]:
    """What r can be for the method of this plan, which has its default r."""
    if usual.adaptive:
        return range(1, usual.image_tokens)
    if isinstance(usual.r, float):
        return _RATIOS
    depth = len(usual.reductions)
    blocks = sorted(make_method(usual.method, {}).default_blocks(depth))
    most = max(1, usual.image_tokens // 2)  # more than half of its tokens never leave a block
    return [_spread_over(blocks, depth, tokens) for tokens in range(1, most * len(blocks) + 1)]


def _spread_over(blocks: Sequence[int], depth: int, tokens: int) -> ReductionSpec:
    """So many tokens in all, evenly over the blocks, what is left over to the first; a plain r where none is."""
    each, over = divmod(tokens, len(blocks))
    if over == 0:
        return each
    more = set(blocks[:over])
    return tuple((each + (block in more) if block in blocks else 0) for block in range(depth))
