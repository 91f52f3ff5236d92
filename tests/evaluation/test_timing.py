"""Interleaved timing, its medians and spreads, and the throughput of a model over batches."""

import time
from itertools import count

import pytest
import torch

from mctf.errors import MctfError
from mctf.evaluation.timing import ThroughputMeter, Timing, time_interleaved, timed

CPU = torch.device("cpu")


def test_every_round_runs_every_callable_and_starts_with_another() -> None:
    calls: list[str] = []
    rounds: list[int] = []
    forwards = {name: lambda name=name: calls.append(name) for name in "ab"}
    timings = time_interleaved(forwards, device=CPU, rounds=3, warmup=1, after_round=lambda: rounds.append(len(calls)))
    assert calls == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert rounds == [2, 4, 6, 8]
    assert {name: len(timing.seconds) for name, timing in timings.items()} == {"a": 3, "b": 3}


def test_the_slower_callable_is_measured_as_slower() -> None:
    timings = time_interleaved(
        {"slow": lambda: time.sleep(0.03), "fast": lambda: time.sleep(0.002)}, device=CPU, rounds=3
    )
    assert timings["fast"].speedup_over(timings["slow"]) > 3
    assert timings["slow"].speedup_over(timings["fast"]) < 1


def test_gradients_are_off_by_default() -> None:
    weight = torch.ones(2, requires_grad=True)
    results = []
    time_interleaved({"only": lambda: results.append(weight * 2)}, device=CPU, rounds=1, warmup=0)
    assert not results[0].requires_grad


def test_speedup_is_the_median_of_the_ratios_within_rounds() -> None:
    baseline, fused = Timing((2.0, 4.0, 100.0)), Timing((1.0, 2.0, 10.0))
    assert fused.speedup_over(baseline) == 2.0


def test_one_outlier_does_not_widen_the_spread() -> None:
    assert Timing((1.0, 1.0, 1.0, 1.0, 50.0)).spread == 0
    assert Timing((1.0, 2.0, 3.0)).spread == pytest.approx(0.5)
    assert Timing((1.0,)).spread == 0


def test_no_rounds_are_refused() -> None:
    with pytest.raises(MctfError, match="at least one round"):
        time_interleaved({"only": lambda: None}, device=CPU, rounds=0)


def test_timed_returns_the_result_and_its_seconds() -> None:
    result, seconds = timed(lambda: time.sleep(0.02) or "done", CPU)
    assert result == "done"
    assert 0.02 <= seconds < 2


class TestThroughputMeter:
    def test_warms_up_once_and_gives_the_result(self) -> None:
        calls = count()
        meter = ThroughputMeter()
        assert [meter.run(lambda: next(calls), images=2, device=CPU) for _ in range(3)] == [1, 2, 3]
        assert [images for images, _ in meter.batches] == [2, 2, 2]

    def test_is_the_median_over_full_batches(self) -> None:
        assert ThroughputMeter([(8, 1.0), (8, 2.0), (8, 100.0), (1, 1e-3)]).images_per_second == 4
