"""Budgets: the closest r of a sweep, and the steps between settings."""

from itertools import pairwise

import numpy as np
import pytest

from mctf import MctfError
from mctf.core.budget import ReductionSweep, check_flops, parse_flops, reduction_steps

COSTS = {0: 10.0, 1: 11.0, 2: 9.0, 3: 7.0, 4: 4.0}  # the first token costs more than it saves
SWEEP = ReductionSweep("some", (1, 2, 3, 4), COSTS.__getitem__)


@pytest.mark.parametrize(
    ("share", "r"), [(1, 0), (0.96, 2), (0.94, 2), (0.9, 2), (0.81, 2), (0.79, 3), (0.56, 3), (0.5, 4), (0.4, 4)]
)
def test_the_closest_step_counts_and_what_fits_comes_before_r_0(share: float, r: int) -> None:
    assert SWEEP.closest_share(share, baseline=10.0) == r


def test_a_baseline_dearer_than_r_0() -> None:
    """As where the last block computes only what is read: a larger budget than that needs no fusion."""
    assert SWEEP.closest_share(0.9, baseline=12.0) == 0
    assert SWEEP.closest_share(0.5, baseline=12.0) == 3


def test_an_impossible_budget_names_the_reachable_ones() -> None:
    with pytest.raises(MctfError, match=r"some cannot keep as little as 0\.399 of .* from 0\.401 to 1"):
        SWEEP.closest_share(0.399, baseline=10.0)


def test_counts_are_one_token_apart() -> None:
    steps = reduction_steps(16, blocks=[4, 1, 2, 2], depth=5, tokens=9)
    assert len(steps) == 12
    assert steps[:4] == [(0, 1, 0, 0, 0), (0, 1, 1, 0, 0), 1, (0, 2, 1, 0, 1)]
    assert steps[-1] == 4
    totals = [3 * step if isinstance(step, int) else sum(step) for step in steps]  # type: ignore[arg-type]
    assert all(after - before == 1 for before, after in pairwise(totals))


def test_millions_of_tokens_take_no_memory() -> None:
    steps = reduction_steps(16, blocks=range(1, 24), depth=24, tokens=10**8)
    assert steps[len(steps) - 1] == 5 * 10**7


def test_ratios_are_a_thousandth_apart_and_no_block_is_no_step() -> None:
    steps = reduction_steps(0.18, blocks=[1], depth=5, tokens=9)
    assert (steps[0], steps[-1], len(steps)) == (0.001, 0.999, 999)
    assert reduction_steps(16, blocks=[], depth=5, tokens=9) == (0,)


@pytest.mark.parametrize("value", [0, -0.1, 1.001, float("nan"), float("inf"), True, None, [0.5], "0.5", 10**400])
def test_what_is_no_share(value: object) -> None:
    with pytest.raises(MctfError, match="is no share of the baseline's FLOPs"):
        check_flops(value)


def test_shares_as_numbers_and_as_text() -> None:
    assert [check_flops(1), check_flops(np.float32(0.5)), parse_flops("0.56"), parse_flops(0.56)] == [
        1,
        0.5,
        0.56,
        0.56,
    ]
    for text in ("", "x", "nan", "0", "56%"):
        with pytest.raises(MctfError, match="to keep 56 %"):
            parse_flops(text)
