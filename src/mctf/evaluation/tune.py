"""The search for a schedule: how many tokens each block merges, by measured KL to the unfused model.

1. Sensitivities: K_b(t), the KL of reducing to t tokens in block b alone, on some of the images.
2. A solver for any budget. The blocks t_0 >= t_1 >= ... leave are chosen by dynamic programming over

       sum_b K_b(t_b) - K_b(t_(b-1)) + lambda * cost_b(t_(b-1), t_b)

   so that a block pays for reducing further what was reduced before it, and later blocks are cheaper with fewer tokens;
   lambda is bisected until the cost is that of the budget. Constant and growing ratios from several blocks on are
   tried as well.
3. Local search: tokens are moved between one block and the others.

A schedule replaces another where its mean KL on all images is lower by more than two standard errors of the
difference. Smaller gains are chance and do not hold on other images.

The result is never worse on these images than the method's own schedule of the same budget. All decisions follow from
the scores alone, so a search that is resumed ends as it would have. It is one file, as every part reads the plans and
scores of one `Tuner`.

Axes: B images, T tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..api import fuse
from ..core.flops import BlockShape
from ..core.schedule import reductions
from ..errors import MctfError
from ..hosts import Architecture, find_host
from ..methods import make_method
from ..models.loading import copy_sharing_weights
from ..planning import FusionRequest, Plan, plan_architecture
from .kl_meter import KLMeter, Schedule
from .significance import Difference
from .timing import time_interleaved

SENSITIVITY_IMAGES, SCREEN_IMAGES = 64, 96
_SENSITIVITY_SHARES = (0.12, 0.25, 0.37, 0.5)  # of the unprotected tokens
_TILTS = (-0.8, 0.0, 0.8)
_STEPS = (0.5, 0.25)  # of the local search, as changes of a block's ratio
_CLEAR = 2.0  # standard errors
_LENGTHS = (0.35, 0.7)  # of what all moves suggest together
_OFFSETS = (-0.16, -0.12, -0.08, -0.04, 0.0, 0.05, 0.10, 0.15, 0.20, 0.25)  # of the budgets in the Pareto table
_HIGHEST = 0.95  # share above which nothing is worth tuning
_LEVELS = 64  # numbers of tokens that the solver tells apart


@dataclass(frozen=True)
class Point:
    """One budget: the method's own schedule and the tuned one, with their measured KL and share of the FLOPs."""

    budget: float
    default: Schedule
    default_flops: float
    default_kl: float
    tuned: Schedule
    flops: float
    gflops: float
    kl: float


@dataclass(frozen=True)
class Tuning:
    """The result: the wanted point, and the points of the Pareto table by increasing cost."""

    best: Point
    points: tuple[Point, ...]
    speedup: float | None = None


class Tuner:
    """Searches schedules of one method on one model. architecture: at the size of the meter's images."""

    def __init__(
        self,
        model: nn.Module,
        meter: KLMeter,
        *,
        method: str,
        options: Mapping[str, Any],
        architecture: Architecture,
        phase: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.model, self.meter, self.architecture, self.phase = model, meter, architecture, phase
        self.options = dict(options)
        self.host = find_host(model)
        made = make_method(method, dict(options)).resolve(class_token=self.host.class_token)
        self.method = made.fit(lambda: architecture.blocks, lambda: architecture.tokens)
        self.depth = len(architecture.blocks)
        self._plans: dict[Schedule, Plan] = {}
        self._request = partial(FusionRequest.of, method, r=None, schedule=None, options=options)
        self.blocks = self._allowed_blocks()
        self._curves: list[tuple[np.ndarray, np.ndarray]] | None = None
        self._tables: dict[tuple[BlockShape, bool, bool], np.ndarray] = {}

    def passes(self) -> int:
        """About how many batches a search measures."""
        few, some, every = (len(self.meter.first(count)) for count in (SENSITIVITY_IMAGES, SCREEN_IMAGES, None))
        sensitivities = len(_SENSITIVITY_SHARES) * len(self.blocks) * few
        local = len(_STEPS) * (len(self.blocks) + 2) * every
        return sensitivities + 14 * some + 6 * every + local + len(_OFFSETS) * (7 * few + 2 * every)

    # Schedules and their cost

    def plan(self, schedule: Schedule) -> Plan:
        if schedule not in self._plans:
            self._plans[schedule] = self._planned(schedule, trim_last=None)
        return self._plans[schedule]

    def _planned(self, schedule: Schedule, *, trim_last: bool | None) -> Plan:
        return plan_architecture(self.architecture, self.method, schedule, schedule, trim_last=trim_last)

    @cached_property
    def _lightest(self) -> Plan:
        """What a schedule costs that fuses nearly nothing; r = 0 costs more where the method trims the last block."""
        return self._planned((0,) * self.depth, trim_last=self.method.trims_last)

    def share(self, schedule: Schedule) -> float:
        return 1 - self.plan(schedule).saved

    def default(self, budget: float, blocks: Sequence[int] | None = None) -> Schedule:
        """The method's own schedule for a budget; raises MctfError with the reachable shares.

        Where it has none but the unfused model, which is above the budget: one token in one block.
        """
        setting = self._request(flops=budget, blocks=blocks).resolve(self.host, self.architecture)
        counts = self._counts(setting.amounts)
        if any(counts) or budget >= 1:
            return counts
        single = [tuple(int(index == block) for index in range(self.depth)) for block in self.blocks]
        within = [schedule for schedule in single if self.share(schedule) <= budget]
        return max(within, key=self.share, default=counts)

    def _counts(self, amounts: Sequence[float]) -> Schedule:
        """The counts that a schedule comes to."""
        tokens, protected = self.architecture.tokens, self.architecture.protected
        steps = reductions(tuple(amounts), tokens, protected=protected, method=self.method)
        return tuple(step.num_reduced for step in steps)

    def _allowed_blocks(self) -> list[int]:
        """Blocks that may fuse: not the last one, after which nothing is cheaper, nor those that the method refuses."""
        allowed = []
        for block in range(max(1, self.depth - 1)):
            one = tuple(int(index == block) for index in range(self.depth))
            try:
                self.method.check_schedule(one)
            except MctfError:
                continue
            allowed.append(block)
        return allowed

    def ratios(self, schedule: Schedule) -> np.ndarray:
        """The share of its unprotected tokens that each block removes."""
        steps = self.plan(schedule).reductions
        left = [max(1, step.tokens - self.architecture.protected) for step in steps]
        return np.array([step.num_reduced / tokens for step, tokens in zip(steps, left, strict=True)])

    def fit(self, ratios: np.ndarray, limit: float) -> Schedule | None:
        """Ratios in this proportion at a share of at most `limit`, as close to it as possible; None out of reach."""
        if not ratios.any():
            return None

        def scaled(factor: float) -> Schedule:
            return self._counts([min(0.5, float(ratio) * factor) for ratio in ratios])

        low, high = 0.0, 0.5 / float(ratios[ratios > 0].min())
        if self.share(scaled(high)) > limit:
            return None
        for _ in range(18):
            middle = (low + high) / 2
            low, high = (low, middle) if self.share(scaled(middle)) <= limit else (middle, high)
        counts = list(scaled(high))
        for block in reversed(self.blocks):  # later blocks cost least: give back what the limit leaves
            while counts[block] and ratios[block]:
                fewer = (*counts[:block], counts[block] - 1, *counts[block + 1 :])
                if self.share(fewer) > limit:
                    break
                counts = list(fewer)
        return self._counts(counts)

    # Sensitivities and the solver

    def measure_sensitivities(self) -> None:
        """K_b as points (log(T / t), KL), one curve per allowed block."""
        self.phase("sensitivities of the blocks")
        free = self.architecture.tokens - self.architecture.protected
        wanted: list[list[Schedule]] = []
        for block in self.blocks:
            counts = sorted({max(1, round(share * free)) for share in _SENSITIVITY_SHARES})
            alone = [self._counts([count if index == block else 0 for index in range(self.depth)]) for count in counts]
            wanted.append([each for each in dict.fromkeys(alone) if each[block]])
        measured = self.meter.kl([each for curve in wanted for each in curve], SENSITIVITY_IMAGES)
        values = iter(measured)
        self._curves = []
        for block, curve in zip(self.blocks, wanted, strict=True):
            tokens = self.architecture.tokens
            x = [math.log(tokens / (tokens - each[block])) for each in curve]
            y = np.maximum.accumulate([max(1e-9, next(values).mean().item()) for _ in curve])
            self._curves.append((np.log(x), np.log(y)))

    def _least_kl(self, block: int) -> float:
        """KL of the smallest measured reduction in one block alone."""
        assert self._curves is not None
        return float(np.exp(self._curves[self.blocks.index(block)][1][0]))

    def solve(self, limit: float) -> Schedule | None:
        """The schedule that the sensitivities predict to be best at a share of at most `limit`."""
        if self._curves is None:
            self.measure_sensitivities()
        tokens, protected = self.architecture.tokens, self.architecture.protected
        step = max(1, math.ceil((tokens - protected) / _LEVELS))
        lowest = max(protected + 1, self.method.min_tokens, 1)
        levels = np.arange(tokens, lowest - 1, -step)
        compression = np.log(np.maximum(tokens / levels, 1 + 1e-12))
        curves = {
            block: _curve(*each, compression) for block, each in zip(self.blocks, self._curves or [], strict=True)
        }
        costs = [self._cost_table(block, levels) for block in range(self.depth)]
        low, high = 0.0, 1.0
        while self._share_at(high, levels, curves, costs)[1] > limit:
            high *= 4
            if high > 1e9:
                return None
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self._share_at(middle, levels, curves, costs)[1] <= limit else (middle, high)
        path, _ = self._share_at(high, levels, curves, costs)
        before = np.concatenate([[tokens], path[:-1]])
        return self.fit((before - path) / np.maximum(1, before - protected), limit)

    def _cost_table(self, block: int, levels: np.ndarray) -> np.ndarray:
        """Cost of a block from level i to level j, as a share of the baseline's; infinite where it cannot go there."""
        shape, protected, may_fuse = self.architecture.blocks[block], self.architecture.protected, block in self.blocks
        trimmed = block == self.depth - 1 and self._lightest.trimmed
        if (shape, may_fuse, trimmed) in self._tables:
            return self._tables[shape, may_fuse, trimmed]
        baseline = self._lightest.gflops_base * 1e9
        table = np.full((len(levels), len(levels)), np.inf)
        for i, tokens in enumerate(levels):
            for j in range(i, len(levels) if may_fuse else i + 1):
                count = int(tokens - levels[j])
                if trimmed:
                    table[i, j] = shape.first(int(tokens), protected) / baseline
                elif count <= (tokens - protected) // 2:
                    table[i, j] = self.method.cost(shape, int(tokens), count, protected=protected).paper / baseline
        self._tables[shape, may_fuse, trimmed] = table
        return table

    def _share_at(
        self, weight: float, levels: np.ndarray, curves: Mapping[int, np.ndarray], costs: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, float]:
        """Tokens after each block that minimize KL + weight * cost, and their share of the FLOPs."""
        size = len(levels)
        value, choices = np.zeros(size), []
        for block in reversed(range(self.depth)):
            loss = curves[block][None, :] - curves[block][:, None] if block in curves else np.zeros((size, size))
            total = loss + weight * costs[block] + value[None, :]
            choices.append(total.argmin(axis=1))
            value = total.min(axis=1)
        path, level, share = [], 0, 0.0
        for block, choice in enumerate(reversed(choices)):
            share += costs[block][level, choice[level]]
            level = int(choice[level])
            path.append(levels[level])
        return np.array(path), share + self._around

    @property
    def _around(self) -> float:
        """Share of the FLOPs outside the blocks."""
        planned = self._lightest
        return (planned.gflops - sum(planned.block_gflops)) / planned.gflops_base

    # The search

    def limit(self, budget: float) -> tuple[Schedule, float]:
        """The method's own schedule for a budget, and the share that a tuned one may have: the budget, or its own."""
        default = self.default(budget)
        return default, max(budget, self.share(default))

    def start(self, default: Schedule, limit: float, tilts: Sequence[float] = _TILTS) -> list[Schedule]:
        """Schedules to begin with: the solver's, that between it and the default, and ratios from some blocks on.

        tilts: how these ratios change with depth, 0 for constant ones.
        """
        found = [self.solve(limit)]
        if found[0] is not None:
            found.append(self.fit((self.ratios(found[0]) + self.ratios(default)) / 2, limit))
        quarter = self.depth // 4
        for first in sorted({max(self.blocks[0], quarter + shift) for shift in (-1, 0, 1, 2)}):
            chosen = [block for block in self.blocks if block >= first]
            for tilt in tilts:
                ratios = np.zeros(self.depth)
                for place, block in enumerate(chosen):
                    ratios[block] = math.exp(tilt * (place / max(1, len(chosen) - 1) - 0.5))
                found.append(self.fit(ratios, limit))
        return [each for each in dict.fromkeys(found) if each is not None and each != default]

    def tune(self, budget: float) -> Point:
        """The best schedule for a share of the FLOPs."""
        default, limit = self.limit(budget)
        if not any(default):  # the unfused model
            return self.point(budget, default)
        starts = self.start(default, limit)
        self.phase("schedules to start from")
        screened = self.meter.kl([default, *starts], SCREEN_IMAGES)
        ranked = sorted(zip([default, *starts], screened, strict=True), key=lambda pair: pair[1].mean().item())
        finalists = [schedule for schedule, _ in ranked[:3]]
        between = [
            self.fit((self.ratios(one) + self.ratios(other)) / 2, limit) for one, other in combinations(finalists, 2)
        ]
        finalists = list(dict.fromkeys([*finalists, *(each for each in between if each is not None)]))
        best, scores = self._better(default, finalists)
        for step in _STEPS:
            self.phase(f"local search, steps of {step:.0%}")
            best, scores = self._search(best, scores, step, limit)
        return self.point(budget, best)

    def _better(self, best: Schedule, others: Sequence[Schedule]) -> tuple[Schedule, Tensor]:
        """The one of lowest mean KL among those that are clearly better than `best`, or `best`; its scores."""
        scores, *measured = self.meter.kl([best, *others])
        clear = [pair for pair in zip(others, measured, strict=True) if Difference.of(pair[1], scores).errors < -_CLEAR]
        return min(clear, key=lambda pair: pair[1].mean().item(), default=(best, scores))

    def _search(self, best: Schedule, scores: Tensor, step: float, limit: float) -> tuple[Schedule, Tensor]:
        """One round: more tokens in each block at the expense of the others, then what these moves suggest together."""
        ratios = self.ratios(best)
        typical = float(ratios[ratios > 0].mean()) if ratios.any() else 0.1
        moves: dict[int, Schedule] = {}
        for block in self.blocks:
            if not ratios[block] and self._least_kl(block) > scores.mean() / 2:
                continue
            moved = ratios.copy()
            moved[block] = ratios[block] * (1 + step) if ratios[block] > typical / 10 else step * typical
            found = self.fit(moved, limit)
            if found is not None and found != best:
                moves[block] = found
        slopes = np.zeros(self.depth)
        for block, moved_scores in zip(moves, self.meter.kl(moves.values()), strict=True):
            slopes[block] = Difference.of(moved_scores, scores).errors
        together = []
        for length in _LENGTHS:
            factors = (1 + step) ** (-np.clip(slopes / 2, -1, 1) * length)
            start = np.where((ratios == 0) & (slopes < -1), step * typical, ratios)
            together.append(self.fit(start * factors, limit))
        return self._better(best, [*moves.values(), *(each for each in together if each not in (None, best))])

    def point(self, budget: float, tuned: Schedule) -> Point:
        """A budget with the tuned schedule, or the method's own where that is closer to the unfused model."""
        default, _ = self.limit(budget)
        default_scores, scores = self.meter.kl([default, tuned])
        if default_scores.mean() <= scores.mean():
            tuned, scores = default, default_scores
        return Point(
            budget=budget,
            default=default,
            default_flops=self.share(default),
            default_kl=default_scores.mean().item(),
            tuned=tuned,
            flops=self.share(tuned),
            gflops=self.plan(tuned).gflops,
            kl=scores.mean().item(),
        )

    def pareto(self, best: Point, *, fits: Callable[[Point], bool] = lambda point: True) -> tuple[Point, ...]:
        """Points around a tuned one: each the best of the schedules to start from and its neighbor, scaled.

        KL falls as the cost rises: what another schedule of the table beats at no higher cost is replaced by it. The
        point of the tuned one is, too, where the other one fits.
        """
        self.phase("other budgets")
        points = {best.budget: best}
        budgets = self.budgets(best.budget)
        upwards = [budget for budget in budgets if budget > best.budget]
        downwards = [budget for budget in reversed(budgets) if budget < best.budget]
        for side in (upwards, downwards):
            tuned = best.tuned
            for budget in side:
                points[budget] = self.solved_point(budget, tuned)
                tuned = points[budget].tuned
        return self._front(best, list(points.values()), fits)

    def _front(self, best: Point, points: Sequence[Point], fits: Callable[[Point], bool]) -> tuple[Point, ...]:
        """Points by increasing cost and falling KL, one of them with the budget of `best`."""
        better = sorted((each for each in points if _dominates(each, best)), key=lambda each: (each.kl, each.flops))
        chosen = next((each for each in better if fits(each)), best)
        kept = replace(best, tuned=chosen.tuned, flops=chosen.flops, gflops=chosen.gflops, kl=chosen.kl)
        others = {(each.flops, each.kl): each for each in points if each.budget != best.budget}
        others.pop((kept.flops, kept.kl), None)
        # those that dominate it do not fit
        left = [each for each in others.values() if not _dominates(kept, each) and not _dominates(each, kept)]
        front = [each for each in left if not any(_dominates(other, each) for other in left)]
        return tuple(sorted([kept, *front], key=lambda each: each.flops))

    def solved_point(self, budget: float, tuned: Schedule | None = None) -> Point:
        """A budget without local search. tuned: a schedule of another budget, to be scaled."""
        default, limit = self.limit(budget)
        scaled = None if tuned is None else self.fit(self.ratios(tuned), limit)
        found = self.start(default, limit, tilts=(0.0,))
        if scaled is not None and scaled not in (*found, default):
            found.append(scaled)
        screened = self.meter.kl(found, SENSITIVITY_IMAGES)
        ranked = sorted(zip(found, screened, strict=True), key=lambda pair: pair[1].mean().item())
        return self.point(budget, self._better(default, [schedule for schedule, _ in ranked[:1]])[0])

    def scaled_point(self, budget: float, tuned: Schedule) -> Point:
        """A budget with a schedule of another one, scaled, where that is clearly better than the method's own."""
        default, limit = self.limit(budget)
        scaled = self.fit(self.ratios(tuned), limit)
        return self.point(budget, self._better(default, [] if scaled is None else [scaled])[0])

    def budgets(self, wanted: float) -> list[float]:
        """Budgets of the Pareto table."""
        lowest = self.lowest()
        around = {round(wanted + offset, 4) for offset in _OFFSETS}
        return sorted(each for each in around if lowest <= each <= self.highest())

    def lowest(self) -> float:
        """The smallest share that the method's own blocks reach, rounded up."""
        blocks = set(self.method.default_blocks(self.depth))
        amounts = [0.5 if block in blocks else 0 for block in range(self.depth)]
        return math.ceil((self.share(self._counts(amounts)) + 0.01) * 100) / 100

    def highest(self) -> float:
        """A share that fuses a little; where the last block is trimmed, that is well below 1."""
        return min(_HIGHEST, math.floor((1 - self._lightest.saved - 0.02) * 100) / 100)

    def tune_flops(self, budget: float) -> Tuning:
        return self._tuning(self.tune(budget))

    def _tuning(self, best: Point, **given: Any) -> Tuning:
        """With the table around a point, whose schedule may be better."""
        points = self.pareto(best, **given)
        return Tuning(next(point for point in points if point.budget == best.budget), points)

    def tune_kl(self, most: float) -> Tuning:
        """The cheapest schedule whose KL is at most `most`."""
        low, high = self.lowest(), self.highest()
        grid = [round(float(each), 4) for each in np.linspace(low, high, 8)]
        self.phase("KL over budgets")
        points = [self.solved_point(budget) for budget in grid]
        reached = [point for point in points if point.kl <= most]
        if not reached:
            least = points[-1]
            raise MctfError(
                f"a KL of {most:g} is out of reach: fusing to {least.flops:.0%} of the FLOPs has {least.kl:.2g}"
            )
        budget = reached[0].budget
        if points.index(reached[0]):
            below = points[points.index(reached[0]) - 1]
            # KL falls about exponentially with the budget
            part = math.log(below.kl / most) / max(1e-9, math.log(below.kl / max(1e-12, reached[0].kl)))
            budget = round(below.budget + min(1.0, part) * (budget - below.budget), 4)
        best = self.tune(budget)
        low, high = max(low, budget - 0.08), min(self.highest(), budget + 0.08)
        found = best if best.kl <= most else reached[0]
        low, high = (low, best.budget) if best.kl <= most else (best.budget, min(high, reached[0].budget))
        self.phase("the cheapest schedule of this KL")
        for _ in range(5):
            middle = round((low + high) / 2, 4)
            point = self.scaled_point(middle, best.tuned)
            if point.kl <= most and point.flops <= found.flops:
                found, high = point, middle
            else:
                low = middle
        tuning = self._tuning(found)
        return replace(
            tuning, best=min((each for each in tuning.points if each.kl <= most), key=lambda each: each.flops)
        )

    def tune_speedup(self, wanted: float, *, batch: Tensor) -> Tuning:
        """The most faithful schedule that is `wanted` times as fast as the unfused model on this device."""
        low, high = self.lowest(), self.highest()
        self.phase("speed over budgets")
        own = self.default(low)
        fastest = own_speed = self.speedup(own, batch)
        if fastest < wanted:
            raise MctfError(
                f"a speed-up of {wanted:g} is out of reach here: {self.method.name} at {low:.0%} of the FLOPs "
                f"has {fastest:.2f} with batches of {len(batch)}"
            )
        for _ in range(6):
            middle = round((low + high) / 2, 4)
            schedule = self.default(middle)
            speed = self.speedup(schedule, batch)
            if speed >= wanted:
                low, own, own_speed = middle, schedule, speed
            else:
                high = middle
        best = self.tune(low)
        speed = self.speedup(best.tuned, batch)
        if speed < wanted:  # a tuned schedule of equal cost may be slower: it fuses in more blocks
            best, speed = self._faster(best, wanted, batch) or (self.point(low, own), own_speed)
            if Difference.of(*self.meter.kl([best.tuned, own])).errors >= -_CLEAR:
                best, speed = self.point(low, own), own_speed
        tuning = self._tuning(best, fits=lambda point: self.speedup(point.tuned, batch) >= wanted)
        return replace(tuning, speedup=speed if tuning.best == best else self.speedup(tuning.best.tuned, batch))

    def _faster(self, slow: Point, wanted: float, batch: Tensor) -> tuple[Point, float] | None:
        """The dearest scaled schedule below a point that is fast enough, and its speed; None where there is none."""
        found, low, high = None, self.lowest(), slow.budget
        for _ in range(6):
            middle = round((low + high) / 2, 4)
            point = self.scaled_point(middle, slow.tuned)
            speed = self.speedup(point.tuned, batch)
            if speed >= wanted:
                found, low = (point, speed), middle
            else:
                high = middle
        return found

    def speedup(self, schedule: Schedule, batch: Tensor) -> float:
        """Over the unfused model, interleaved, on this batch."""
        fused = fuse(copy_sharing_weights(self.model), self.method.name, r=schedule, **self.options).eval()
        forwards = {"baseline": partial(self.model, batch), "fused": partial(fused, batch)}
        timings = time_interleaved(forwards, device=batch.device, rounds=7)
        return timings["fused"].speedup_over(timings["baseline"])


def _dominates(one: Point, other: Point) -> bool:
    """Whether one is better than the other in cost or KL, and worse in neither."""
    return one.flops <= other.flops and one.kl <= other.kl and (one.flops, one.kl) != (other.flops, other.kl)


def _curve(x: np.ndarray, y: np.ndarray, compression: np.ndarray) -> np.ndarray:
    """KL at these compressions, log(T / t), by a power law between measured points and beyond them; 0 at t = T."""
    z = np.log(np.maximum(compression, 1e-12))
    if len(x) < 2:
        values = y[0] + 2 * (z - x[0])
    else:
        first, last = max(1.0, (y[1] - y[0]) / (x[1] - x[0])), max(1.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
        values = np.where(z < x[0], y[0] + first * (z - x[0]), np.interp(z, x, y))
        values = np.where(z > x[-1], y[-1] + last * (z - x[-1]), values)
    return np.maximum.accumulate(np.where(compression > 1e-9, np.exp(np.minimum(values, 20.0)), 0.0))
