"""Which tokens a trace calls dropped: those that a method threw away, and never those that it made one or left waiting.

The references of the methods (`naive`, `dropping`, `test_a_vit`) say it token by token; here is what holds for all.
"""

from typing import Any

import pytest
import torch

import mctf
from helpers.learned import teach
from helpers.models import DEPTH, make, make_images, run, tokens_of
from helpers.naive import assert_dropped_as_naive
from helpers.reference import Result
from mctf.core.assignment import Assignment
from mctf.methods.base import BlockOutput

pytestmark = pytest.mark.filterwarnings("ignore::mctf.methods._layers.UntrainedWarning")
DROPPING: dict[str, list[dict[str, Any]]] = {
    "dynamic_vit": [{"r": 0.3}],
    "ats": [{"r": 1}],
    "a_vit": [{"gamma": 3.0, "beta": 9.0}],
    "ia_red2": [{"r": 1}],
    "random": [{"r": 9}],
    "free_drop": [{"r": 9}],
    "evit": [{"r": 0.3, "fuse_inattentive": False}],
}
BOTH = {"diffrate"}  # merges and drops; its reference says which
KEEPING: dict[str, list[dict[str, Any]]] = {
    "mctf": [{}, {"pooling": "max"}, {"pooling": "size"}, {"attention": "previous"}, {"attention": "precise"}],
    "mctf_exact": [{}],
    "tome": [{}],
    "evit": [{"r": 0.3}],
    "bat": [{"r": 0.3}],
    "spvit": [{"r": 0.34}],
    "evo_vit": [{}],
    "ward": [{}],
    "pitome": [{}],
    "atc": [{}],
    "diffrate": [{"prune": False}],
}
dropping, keeping = (
    pytest.mark.parametrize(("method", "options"), [(name, each) for name in table for each in table[name]], ids=str)
    for table in (DROPPING, KEEPING)
)


@torch.no_grad()
def traced(method: str, *, dtype: torch.dtype = torch.float32, batch: int = 1, **options: Any) -> mctf.Trace:
    model = make("registers").to(dtype)
    if method in ("dynamic_vit", "spvit", "ia_red2"):
        teach(model, method, options.get("r"))
    mctf.fuse(model, method, **options)
    with mctf.trace(model) as trace:
        run(model, make_images(model, batch))
    return trace


def test_every_method_is_tested() -> None:
    assert {*DROPPING, *KEEPING, *BOTH} == set(mctf.methods())


@dropping
def test_every_token_of_one_image_is_present_or_dropped(method: str, options: dict[str, Any]) -> None:
    trace = traced(method, **options)
    counts = [int(trace.dropped(block).sum()) for block in range(DEPTH)]
    assert [69 - count for count in counts] == trace.token_counts
    assert counts[-1] > 0
    for block in range(1, DEPTH):
        assert (trace.dropped(block) >= trace.dropped(block - 1)).all(), "a dropped token stays dropped"


@dropping
def test_tokens_that_stay_do_not_share_a_slot(method: str, options: dict[str, Any]) -> None:
    trace = traced(method, batch=3, **options)
    for slots, dropped in zip(trace.source_map(), trace.dropped(), strict=True):
        assert len(slots[~dropped].unique()) == (~dropped).sum()
        assert not dropped[:5].any(), "protected tokens stay"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@keeping
def test_what_is_fused_or_waits_is_not_dropped(method: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    trace = traced(method, dtype=dtype, **options)
    assert trace.dropped().shape == (1, 69)
    assert not trace.dropped().any()
    assert method == "evo_vit" or trace.token_counts[-1] < 69


def test_free_dropping_takes_the_last_tokens() -> None:
    trace = traced("free_drop", r=[0, 9, 0, 20], batch=2)
    for block, left in enumerate((69, 60, 60, 40)):
        assert trace.dropped(block).tolist() == [[token >= left for token in range(69)]] * 2


def test_r_0_drops_nothing() -> None:
    for method in DROPPING:
        assert not traced(method, r=0).dropped().any()


@pytest.mark.parametrize("method", ["dynamic_vit", "spvit"])
@torch.no_grad()
def test_patches_behind_a_mask_are_still_there(method: str) -> None:
    model = mctf.fuse(make("plain"), method).train()
    with mctf.trace(model) as trace:
        run(model, make_images(model, 2))
    assert trace.dropped().shape == (2, tokens_of(model))
    assert not trace.dropped().any()


def step(slots: list[int], weights: list[float]) -> BlockOutput:
    count = max(slots) + 1
    return BlockOutput(
        torch.zeros(1, count, 3), None, Assignment(torch.tensor([slots]), count), torch.tensor([weights])
    )


def recorded(*steps: BlockOutput) -> mctf.Trace:
    trace = mctf.Trace()
    for index, each in enumerate(steps):
        trace.record(index, torch.zeros(1, each.weights.shape[1], 3), each)
    return trace


def test_a_token_fused_into_one_that_is_dropped_later_goes_with_it() -> None:
    fusing = step([0, 1, 2, 1, 3], [1.0, 0.5, 1.0, 0.25, 1.0])  # token 3 into token 1
    losing = step([0, 0, 1, 2], [1.0, 0.0, 1.0, 1.0])  # the two of them
    trace = recorded(fusing, losing)
    assert trace.dropped(0).tolist() == [[False] * 5]
    assert trace.dropped().tolist() == trace.dropped(-1).tolist() == [[False, True, False, True, False]]
    assert trace.blocks[1].dropped.tolist() == [[False, True, False, False]]


def test_a_token_that_was_dropped_stays_so_whatever_becomes_of_its_slot() -> None:
    losing = step([0, 1, 1, 2], [1.0, 1.0, 0.0, 1.0])
    fusing = step([0, 1, 1], [1.0, 0.7, 0.7])
    assert recorded(losing, fusing).dropped().tolist() == [[False, False, True, False]]


def test_the_comparison_with_the_naive_can_fail() -> None:
    trace = traced("free_drop", r=[9, 0, 0, 0])
    described = [set(range(60))] * DEPTH
    assert_dropped_as_naive(trace, [Result(torch.zeros(0), [], covered=described)])
    for wrong in ({*range(61)}, {*range(59)}):
        with pytest.raises(AssertionError):
            assert_dropped_as_naive(trace, [Result(torch.zeros(0), [], covered=[*described[:-1], wrong])])
