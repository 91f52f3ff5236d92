"""Budgets: the r that brings a method to a wanted cost, by bisection over its settings. Nothing is run.

The settings of a method are ordered from the most to the least expensive. A method whose default r is a count reduces a
little in every block: one step is one more token in one block, the first blocks first. A method whose default r is a
ratio reduces much in a few blocks: one step is a thousandth. The step closest to the budget is chosen, above or below;
steps are so fine that neither side has an advantage. Near a share of 1, where they are not, what fits the budget comes
before r = 0, and the first step before those that cost more than it.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ..errors import MctfError, shown
from .schedule import ReductionSpec

_RATIOS = tuple(thousandths / 1000 for thousandths in range(1, 1000))


def check_flops(value: object) -> float:
    """The share of the baseline's FLOPs to keep; raises MctfError unless it is a number above 0 and at most 1."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else 0.0
    except OverflowError:
        number = 0.0
    if not 0 < number <= 1:
        raise MctfError(f"flops={shown(value)} is no share of the baseline's FLOPs: write 0.56 to keep 56 % of them")
    return number


def parse_flops(value: object) -> float:
    """`check_flops` of a number or of its text, as typed in a shell or a config file."""
    try:
        return check_flops(float(value) if isinstance(value, str) else value)
    except ValueError:
        raise MctfError(
            f"flops={shown(value)} is no share of the baseline's FLOPs: write 0.56 to keep 56 % of them"
        ) from None


@dataclass(frozen=True)
class ReductionSweep:
    """Settings of a method on one model. reductions: r from the most to the least expensive. gflops: cost of an r.

    The first few settings may cost more than the unfused model, as matching costs what one token saves.
    """

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
        return self._bisect(target)

    def closest_share(self, share: float, *, baseline: float) -> ReductionSpec:
        """The r whose cost is closest to this share of the baseline's (GFLOPs); r = 0 where nothing else fits.

        Raises MctfError with the reachable shares for one below them.
        """
        low, unfused = self.bounds[0], self.gflops(0)
        if share < low / baseline:
            raise MctfError(
                f"{self.method} cannot keep as little as {share:g} of this model's FLOPs: "
                f"choose flops from {_round_up(low / baseline):.3f} to 1"
            )
        target = share * baseline
        if target >= unfused:
            return 0
        r, lightest = self._bisect(target), self.reductions[0]
        if self.gflops(lightest) <= min(target, self.gflops(r)):  # it costs less, as matching a few tokens costs more
            r = lightest
        cost = self.gflops(r)
        return r if cost <= target or cost - target < unfused - target else 0

    def _bisect(self, target: float) -> ReductionSpec:
        index = bisect_left(self.reductions, -target, key=lambda r: -self.gflops(r))
        return min(self.reductions[max(0, index - 1) : index + 1], key=lambda r: abs(self.gflops(r) - target))


def _round_up(share: float) -> float:
    """To three digits, so that the printed share is reachable."""
    return min(1.0, int(share * 1000 + 1) / 1000)


def reduction_steps(
    default_r: ReductionSpec, *, blocks: Sequence[int], depth: int, tokens: int
) -> Sequence[ReductionSpec]:
    """r from the most to the least expensive, for a method with this default that reduces in these blocks."""
    if isinstance(default_r, float):
        return _RATIOS
    return _CountSteps(tuple(sorted(set(blocks))), depth, tokens) if blocks else (0,)


@dataclass(frozen=True)
class _CountSteps(Sequence[ReductionSpec]):
    """1, 2, … tokens in total, evenly over the blocks, the remainder to the first ones; one number where it divides.

    Entries are made when they are read: large images have millions.
    """

    blocks: tuple[int, ...]
    depth: int
    tokens: int

    def __len__(self) -> int:
        return max(1, self.tokens // 2) * len(self.blocks)  # no block merges more than half of its tokens

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        each, remainder = divmod(range(1, len(self) + 1)[index], len(self.blocks))
        if remainder == 0:
            return each
        more = self.blocks[:remainder]
        return tuple((each + (block in more) if block in self.blocks else 0) for block in range(self.depth))
