"""Parsing r, and capping it where too few tokens are left."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mctf import MctfError
from mctf.core.schedule import FAST_RATIO, Reduction, fast_blocks, make_schedule, parse_blocks, parse_r, reductions
from mctf.methods import MCTF

many = settings(max_examples=200)
counts = st.integers(0, 300)
ratios = st.floats(0, 1, exclude_max=True)
depths = st.integers(1, 40)


@many
@given(
    entry=st.one_of(counts, ratios), tokens=st.integers(1, 600), protected=st.integers(0, 6), floor=st.integers(0, 20)
)
def test_the_reduction_of_a_block_is_capped(entry: float, tokens: int, protected: int, floor: int) -> None:
    class Merging(MCTF):
        min_tokens = floor

    class Dropping(Merging):
        drops = True

    unprotected = tokens - protected
    requested = entry if isinstance(entry, int) else entry * unprotected
    for method, most in ((Merging(), unprotected // 2), (Dropping(), unprotected - 1)):
        reduced = method.num_reduced(entry, tokens, protected=protected, initial=tokens, stage=0)
        assert 0 <= reduced <= max(0, most)
        assert reduced == 0 or tokens - reduced >= floor
        assert reduced <= max(0, requested + 1e-6)
        if 1 <= requested <= most and tokens - requested >= floor:
            assert reduced == math.floor(requested + 1e-9)


@pytest.mark.parametrize(
    ("entry", "tokens", "protected", "taken"),
    [
        (16, 197, 1, 16),
        (16, 21, 1, 10),  # half of the unprotected ones
        (16, 12, 1, 2),  # ten remain
        (16, 10, 1, 0),
        (16, 5, 1, 0),  # fewer than ten to begin with
        (0.35, 197, 1, 68),
        (0.29, 101, 1, 29),  # 0.29 * 100 is 28.999999999999996 in binary
        (0.9, 101, 1, 50),
    ],
)
def test_capping_by_hand(entry: float, tokens: int, protected: int, taken: int) -> None:
    assert MCTF().num_reduced(entry, tokens, protected=protected, initial=tokens, stage=0) == taken


@many
@given(entry=st.one_of(counts, ratios), depth=depths, data=st.data())
def test_one_number_goes_to_the_chosen_blocks(entry: float, depth: int, data: st.DataObject) -> None:
    blocks = data.draw(st.lists(st.integers(-depth, depth - 1)))
    schedule = make_schedule(entry, depth=depth, blocks=blocks, default_blocks=range(1, depth))
    chosen = {block % depth for block in blocks}
    assert schedule == tuple(entry if block in chosen else 0 for block in range(depth))
    default = make_schedule(entry, depth=depth, blocks=None, default_blocks=range(1, depth))
    assert default == tuple(entry if block else 0 for block in range(depth))


@many
@given(entries=st.lists(st.one_of(counts, ratios), min_size=1, max_size=12))
def test_a_list_is_the_schedule(entries: list[float]) -> None:
    for kind in (list, tuple):
        schedule = make_schedule(kind(entries), depth=len(entries), blocks=None, default_blocks=())
        assert schedule == tuple(entries)
    for depth in (len(entries) - 1, len(entries) + 1):
        with pytest.raises(MctfError, match="one entry per block"):
            make_schedule(entries, depth=depth, blocks=None, default_blocks=())


def test_numbers_of_numpy_are_numbers() -> None:
    schedule = make_schedule([np.int64(3), np.float32(0.5)], depth=2, blocks=None, default_blocks=())
    assert schedule == (3, 0.5)
    assert [type(entry) for entry in schedule] == [int, float]


@pytest.mark.parametrize(
    ("depth", "blocks"), [(12, (3, 6, 9)), (24, (6, 12, 18)), (4, (1, 2, 3)), (2, (0, 1)), (1, (0,))]
)
def test_the_fast_preset_scales_with_the_depth(depth: int, blocks: tuple[int, ...]) -> None:
    assert fast_blocks(depth) == blocks
    schedule = make_schedule("fast", depth=depth, blocks=None, default_blocks=())
    assert schedule == tuple(FAST_RATIO if block in blocks else 0 for block in range(depth))
    assert FAST_RATIO == 0.35


@given(depth=depths)
def test_the_fast_preset_fits_every_depth(depth: int) -> None:
    assert set(fast_blocks(depth)) <= set(range(depth))


@many
@given(schedule=st.lists(st.one_of(counts, ratios), max_size=20), tokens=st.integers(10, 600))
def test_reductions_follow_each_other(schedule: list[float], tokens: int) -> None:
    steps = reductions(schedule, tokens, protected=1, method=MCTF())
    entering = [step.tokens for step in steps]
    leaving = [step.num_remaining for step in steps]
    assert entering == [tokens, *leaving][: len(steps)]
    assert all(step.num_reduced <= max(step.num_requested, 0) for step in steps)
    assert all(step.num_remaining >= 10 for step in steps)


def test_a_reduction_records_what_was_requested() -> None:
    steps = reductions([16, 0.5], 22, protected=1, method=MCTF())
    assert steps == [Reduction(22, 16, 10, 12), Reduction(12, 5, 2, 10)]


@pytest.mark.parametrize(
    ("value", "r"),
    [
        ("16", 16),
        (" 0.35 ", 0.35),
        ("1e-1", 0.1),
        ("fast", "fast"),
        ("0,8,0.5", (0, 8, 0.5)),
        (16, 16),
        ([0, "8"], (0, 8)),
    ],
)
def test_r_is_parsed_alike_from_text_and_python(value: object, r: object) -> None:
    assert parse_r(value) == r


@pytest.mark.parametrize("value", ["", "x", "fats", "-1", "1.5", "nan", "inf", "3,x", None, True, [True], "fast,3", {}])
def test_what_no_model_could_take_is_refused(value: object) -> None:
    with pytest.raises(MctfError, match="r"):
        parse_r(value)


def test_blocks_are_parsed_alike_from_text_and_python() -> None:
    assert parse_blocks("3, 6,-1") == parse_blocks([3, 6, -1]) == (3, 6, -1)
    for value in ("", "3,x", "3.5", 3, [True], None):
        with pytest.raises(MctfError, match="block numbers"):
            parse_blocks(value)
