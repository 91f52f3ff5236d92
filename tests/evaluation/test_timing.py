"""Timing of several ways in turn: who runs when, and what medians and spreads say."""

import time

import pytest
import torch

from mctf.errors import MctfError
from mctf.evaluation.timing import Timing, measure

CPU = torch.device("cpu")


def test_every_round_runs_every_way_and_begins_with_another() -> None:
    calls: list[str] = []
    rounds: list[int] = []
    forwards = {name: lambda name=name: calls.append(name) for name in "ab"}
    timings = measure(forwards, device=CPU, rounds=3, warmup=1, after_round=lambda: rounds.append(len(calls)))
    assert calls == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert rounds == [2, 4, 6, 8]
    assert {name: len(timing.seconds) for name, timing in timings.items()} == {"a": 3, "b": 3}


def test_the_slower_way_is_seen_to_be_slower() -> None:
    timings = measure({"slow": lambda: time.sleep(0.03), "fast": lambda: time.sleep(0.002)}, device=CPU, rounds=3)
    assert timings["fast"].speedup_over(timings["slow"]) > 3
    assert timings["slow"].speedup_over(timings["fast"]) < 1


def test_no_gradient_is_kept() -> None:
    weight = torch.ones(2, requires_grad=True)
    results = []
    measure({"only": lambda: results.append(weight * 2)}, device=CPU, rounds=1, warmup=0)
    assert not results[0].requires_grad


def test_speedup_is_the_median_of_the_ratios_within_rounds() -> None:
    plain, fused = Timing((2.0, 4.0, 100.0)), Timing((1.0, 2.0, 10.0))
    assert fused.speedup_over(plain) == 2.0


def test_one_outlier_does_not_widen_the_spread() -> None:
    assert Timing((1.0, 1.0, 1.0, 1.0, 50.0)).spread == 0
    assert Timing((1.0, 2.0, 3.0)).spread == pytest.approx(0.5)
    assert Timing((1.0,)).spread == 0


def test_no_rounds_are_refused() -> None:
    with pytest.raises(MctfError, match="at least one round"):
        measure({"only": lambda: None}, device=CPU, rounds=0)
