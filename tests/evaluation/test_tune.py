"""The search for a schedule, on a model whose KL is known by formula, and on a real one."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch

import mctf
from mctf import MctfError
from mctf.evaluation.kl_meter import KLMeter, Schedule, ScoreFile
from mctf.evaluation.tune import Tuner, _curve
from mctf.hosts import find_host

TINY = "deit_tiny_patch16_224"


class FormulaMeter:
    """KL by formula: block b pays weight_b * growth of log(T / t) ** 2, on images that differ a little."""

    def __init__(self, tuner_of: Any, weights: list[float], *, images: int = 128, noise: float = 0.05) -> None:
        self.weights, self.images, self.measured = weights, images, 0
        self.noise = 1 + noise * torch.randn(images, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.plan = tuner_of

    def first(self, images: int | None) -> list[int]:
        return [0] * math.ceil((images or self.images) / 32)

    def kl(self, schedules: Any, images: int | None = None) -> list[torch.Tensor]:
        found = []
        for schedule in list(schedules):
            self.measured += 1
            total, counts = 0.0, [197, *self.plan(schedule)]
            for weight, before, after in zip(self.weights, counts, counts[1:], strict=False):
                total += weight * (math.log(197 / after) ** 2 - math.log(197 / before) ** 2)
            found.append(total * self.noise[: images or self.images])
        return found


@pytest.fixture(scope="module")
def deit() -> Any:
    return timm.create_model(TINY).eval()


def tuner(model: Any, weights: list[float], method: str = "ward") -> tuple[Tuner, FormulaMeter]:
    architecture = find_host(model).architecture(None)

    def counts(schedule: Schedule) -> list[int]:
        return mctf.plan(model, method=method, r=schedule, architecture=architecture).token_counts

    meter = FormulaMeter(counts, weights)
    made = Tuner(model, meter, method=method, options={}, architecture=architecture)  # type: ignore[arg-type]
    return made, meter


EARLY = [0.1] * 12
LATE = [10.0] * 6 + [0.01] * 6


@pytest.mark.parametrize("weights", [EARLY, LATE], ids=["early", "late"])
def test_the_search_beats_the_methods_own_schedule(deit: Any, weights: list[float]) -> None:
    search, meter = tuner(deit, weights)
    point = search.tune(0.7)
    assert point.kl < 0.9 * point.default_kl
    assert point.flops <= max(0.7, point.default_flops)
    assert point.flops == pytest.approx(0.7, abs=0.01)
    assert meter.measured < 120
    fused = [block for block, count in enumerate(point.tuned) if count]
    assert (min(fused) < 3) if weights is EARLY else (min(fused) >= 5)
    assert mctf.plan(deit, method="ward", r=point.tuned).capped == []


def test_it_is_deterministic(deit: Any) -> None:
    assert tuner(deit, LATE)[0].tune(0.7) == tuner(deit, LATE)[0].tune(0.7)


def test_never_worse_than_the_methods_own_schedule(deit: Any) -> None:
    search, meter = tuner(deit, LATE)
    default = search.default(0.6)
    measure = meter.kl
    meter.kl = lambda schedules, images=None: [  # type: ignore[method-assign]
        scores if schedule == default else scores + 100
        for schedule, scores in ((each, measure([each], images)[0]) for each in list(schedules))
    ]
    point = search.tune(0.6)
    assert point.tuned == point.default == default


@pytest.mark.parametrize(
    "method", ["mctf", "tome", pytest.param("evit", marks=[pytest.mark.slow, pytest.mark.nightly])]
)
def test_other_methods_too(deit: Any, method: str) -> None:
    search, _ = tuner(deit, LATE, method)
    point = search.tune(0.7)
    assert point.kl <= point.default_kl
    assert point.flops <= max(0.7, point.default_flops)


def test_points_of_the_table(deit: Any) -> None:
    search, _ = tuner(deit, LATE)
    tuning = search.tune_flops(0.6)
    assert tuning.best in tuning.points
    assert len(tuning.points) >= 8
    assert all(point.kl <= point.default_kl for point in tuning.points)
    shares = [point.flops for point in tuning.points]
    assert shares == sorted(shares)


def test_the_table_is_monotone_and_no_schedule_in_it_is_beaten(deit: Any) -> None:
    search, _ = tuner(deit, LATE)
    best = search.tune(0.6)
    step = {
        budget: (best.flops + budget - 0.6, kl) for budget, kl in ((0.5, 9.0), (0.56, 8.0), (0.58, 8.5), (0.8, 7.0))
    }
    points = [best, *(replace(best, budget=budget, flops=flops, kl=kl) for budget, (flops, kl) in step.items())]
    best = replace(best, kl=8.2)
    for fits, kl in ((lambda _: True, 8.0), (lambda _: False, 8.2)):
        front = search._front(best, points[1:], fits)
        assert [point.flops for point in front] == sorted(point.flops for point in front)
        assert [point.kl for point in front] == sorted({point.kl for point in front}, reverse=True)
        assert next(point.kl for point in front if point.budget == 0.6) == kl
    search.solved_point = lambda budget, tuned=None: replace(best, budget=budget, kl=8.0, tuned=(1,) * 12, flops=0.5)  # type: ignore[method-assign]
    tuning = search._tuning(best)
    assert tuning.best.tuned == (1,) * 12, "what is written costs less and is better"
    assert tuning.points == (tuning.best,)


@pytest.mark.parametrize("method", ["ward", "mctf"])
@pytest.mark.parametrize("budget", [0.9, 0.95, 0.97, 1.0])
def test_budgets_near_one(deit: Any, method: str, budget: float) -> None:
    """As close as one token in one block allows; what trims the last block has nothing between that and r = 0."""
    search, _ = tuner(deit, LATE, method)
    point = search.tune(budget)
    assert point.flops == 1 - mctf.plan(deit, method=method, r=point.tuned).saved
    highest = max(search.share(tuple(int(index == block) for index in range(12))) for block in range(1, 11))
    wanted = budget if budget == 1 else min(budget, highest)
    assert point.flops == pytest.approx(wanted, abs=0.004)
    assert any(point.tuned) == (budget < 1)


def test_the_cheapest_schedule_of_a_kl(deit: Any) -> None:
    search, _ = tuner(deit, EARLY)
    tuning = search.tune_kl(0.05)
    assert 0.04 < tuning.best.kl <= 0.05
    with pytest.raises(MctfError, match=r"a KL of 1e-12 is out of reach: fusing to 9\d% of the FLOPs has"):
        search.tune_kl(1e-12)


def test_impossible_budgets_are_refused(deit: Any) -> None:
    with pytest.raises(MctfError, match="ward cannot keep as little"):
        tuner(deit, EARLY)[0].tune(0.1)


def test_a_fitted_schedule_uses_its_budget(deit: Any) -> None:
    search, _ = tuner(deit, EARLY)
    for limit in (0.5, 0.6, 0.8):
        ratios = np.array([0, 0, 1, 1, 2, 0, 1, 1, 1, 1, 1, 0], dtype=float)
        found = search.fit(ratios, limit)
        assert found is not None
        assert limit - 0.004 < search.share(found) <= limit
        assert all(ratio for count, ratio in zip(found, ratios, strict=True) if count)
    assert search.fit(np.zeros(12), 0.5) is None
    assert search.fit(np.eye(12)[10], 0.5) is None


def test_curves_pass_through_the_measured_points() -> None:
    compression = np.log(np.array([1.0, 1.1, 1.5, 2.0, 8.0]))
    values = _curve(np.log(compression[1:4]), np.log(np.array([0.1, 0.5, 0.9])), compression)
    assert values[0] == 0
    np.testing.assert_allclose(values[1:4], [0.1, 0.5, 0.9])
    assert values[4] > 0.9


def test_a_real_model_and_its_speed() -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=3).eval()
    batch = torch.randn(2, 3, 160, 160)
    meter = KLMeter(model, [batch], method="ward", options={"rounds": 1}, file=ScoreFile(None, ""))
    architecture = find_host(model).architecture(None)
    search = Tuner(model, meter, method="ward", options={"rounds": 1}, architecture=architecture)
    assert search.speedup(search.default(0.7), batch) > 0
    search.speedup = lambda schedule, batch: 1 / search.share(schedule)  # type: ignore[method-assign]
    tuning = search.tune_speedup(1.25, batch=batch)
    assert tuning.speedup is not None
    assert tuning.speedup >= 1.25
    assert tuning.best.flops == pytest.approx(0.8, abs=0.03)
    with pytest.raises(MctfError, match=r"a speed-up of 50 is out of reach here: ward at \d\d% of the FLOPs has"):
        search.tune_speedup(50, batch=batch)


def test_a_schedule_that_is_slower_than_wanted_is_not_given(deit: Any) -> None:
    """Tuned schedules may be slower than the method's own at the same cost: then it is one of these."""
    search, _ = tuner(deit, LATE)

    def speedup(schedule: Schedule, batch: torch.Tensor) -> float:
        own = sum(map(bool, schedule)) >= 8 and schedule[3]
        return (1.0 if own else 0.8) / search.share(schedule)

    search.speedup = speedup  # type: ignore[method-assign]
    tuning = search.tune_speedup(1.5, batch=torch.zeros(1))
    assert tuning.speedup is not None
    assert tuning.speedup >= 1.5
    assert speedup(tuning.best.tuned, torch.zeros(1)) == tuning.speedup
    assert tuning.best in tuning.points


@pytest.mark.parametrize("aim", ["kl", "speedup"])
def test_other_aims_keep_a_schedule_that_is_not_clearly_better(deit: Any, aim: str) -> None:
    """Schedules other than the method's own are a little better, but by less than two standard errors."""
    search, meter = tuner(deit, [1.0] * 12)
    measure, own = meter.kl, set()
    make, gain = search.default, 0.01 + 0.3 * torch.randn(128, generator=torch.Generator().manual_seed(1)).double()

    def default(*given: Any, **more: Any) -> Schedule:
        own.add(schedule := make(*given, **more))
        return schedule

    def kl(schedules: Any, images: int | None = None) -> list[torch.Tensor]:
        found = []
        for each in list(schedules):
            share = search.share(each)
            scores = torch.full((images or 128,), (1 - share) ** 2, dtype=torch.float64)
            noise = gain[: len(scores)]
            found.append(scores if each in own else scores * (1 - 0.001 - (noise - noise.mean())))
        return found

    search.default, meter.kl = default, kl  # type: ignore[method-assign]
    search.speedup = lambda schedule, batch: 1 / search.share(schedule)  # type: ignore[method-assign]
    tuning = search.tune_kl(0.09) if aim == "kl" else search.tune_speedup(1.4, batch=torch.zeros(1))
    assert tuning.best.tuned == tuning.best.default
    assert measure is not None
