"""fuse and plan by a share of the baseline's FLOPs: the r that comes out, and what is refused."""

from typing import Any

import pytest
import timm
import torch

import mctf
from helpers.models import make, make_images, run
from helpers.refusals import assert_refused
from mctf.evaluation.match_flops import sweep_reductions
from mctf.methods import _REGISTRY, make_method

TINY = "deit_tiny_patch16_224"
SOLVED = [name for name in _REGISTRY if not make_method(name, {}).adaptive]


@pytest.fixture(scope="module")
def tiny() -> Any:
    return timm.create_model(TINY).eval()


@pytest.mark.parametrize("method", SOLVED)
@pytest.mark.parametrize("flops", [0.56, 0.8])
def test_a_plan_is_brought_to_its_budget(tiny: Any, method: str, flops: float) -> None:
    plan = mctf.plan(tiny, method=method, flops=flops)
    assert 1 - plan.saved == pytest.approx(flops, abs=0.01)
    assert mctf.plan(tiny, method=method, r=plan.r).token_counts == plan.token_counts
    assert isinstance(plan.r, float) == isinstance(make_method(method, {}).default_r, float)


def test_a_fused_model_shows_what_came_out(tiny: Any) -> None:
    model = timm.create_model(TINY)
    mctf.fuse(model, "ward", flops=0.56)
    assert model.blocks.r == mctf.plan(tiny, method="ward", flops=0.56).r
    mctf.set_r(model, 0.1)
    assert model.blocks.r == 0.1


@pytest.mark.parametrize("method", ["mctf", "ward"])
def test_blocks_are_those_of_the_user(tiny: Any, method: str) -> None:
    plan = mctf.plan(tiny, method=method, flops=0.7, blocks=iter([3, -6]))
    assert [index for index, step in enumerate(plan.reductions) if step.num_reduced] == [3, 6]
    assert 1 - plan.saved == pytest.approx(0.7, abs=0.01)
    model = timm.create_model(TINY)
    mctf.fuse(model, method, flops=0.7, blocks=[3, 6])
    assert model.blocks.r == plan.r
    mctf.set_r(model, 8)
    assert model.blocks.schedule == (0, 0, 0, 8, 0, 0, 8, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("flops", [0.95, 0.97, 0.999])
def test_near_one_a_budget_is_kept(tiny: Any, flops: float) -> None:
    """A trimmed last block saves 7 % at once; matching a few tokens costs more than they save."""
    plan = mctf.plan(tiny, method="ward", flops=flops)
    assert plan.trimmed
    assert 0.92 < 1 - plan.saved <= mctf.plan(tiny, method="ward", r=0.01).gflops / plan.gflops_base
    assert mctf.plan(tiny, method="mctf", flops=flops).gflops <= plan.gflops_base
    assert any(step.num_reduced for step in mctf.plan(tiny, method="mctf", flops=min(flops, 0.99)).reductions)


def test_a_budget_of_all_flops_fuses_nothing() -> None:
    model = make("plain")
    images = make_images(model, 2)
    with torch.no_grad():
        before = run(model, images)
        assert torch.equal(run(mctf.fuse(model, flops=1), images), before)
    assert model.blocks.r == 0


def test_options_and_dense_count(tiny: Any) -> None:
    assert mctf.plan(tiny, flops=0.56, bidirectional=False).saved == pytest.approx(0.44, abs=0.01)
    dense = mctf.plan(tiny, flops=0.56, dense=True)
    assert 1 - dense.saved == pytest.approx(0.56, abs=0.01)


def test_compare_and_plan_solve_alike(tiny: Any) -> None:
    """One solver: equal costs give equal r."""
    target = mctf.plan(tiny, r=0).gflops_base * 0.6
    for method in ("mctf", "ward"):
        sweep = sweep_reductions(tiny, method, images=torch.zeros(1, 3, 224, 224))
        assert sweep is not None
        assert sweep.closest(target) == mctf.plan(tiny, method=method, flops=0.6).r


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"flops": 0.5, "r": 16}, "r=16 and flops=0.5 both say how much to fuse"),
    ({"flops": 0.5, "r": 0}, "r=0 and flops=0.5 both"),
    ({"flops": 0}, "flops=0 is no share"),
    ({"flops": float("nan")}, "flops=nan is no share"),
    ({"flops": 1.5}, "flops=1.5 is no share"),
    ({"flops": "0.5"}, "flops='0.5' is no share"),
    ({"flops": 0.01}, "mctf cannot keep as little as 0.01 of this model's FLOPs: choose flops from 0."),
    ({"flops": 0.5, "blocks": []}, "choose flops from 1.000 to 1"),
    ({"flops": 0.5, "blocks": [99]}, "blocks names 99"),
    ({"flops": 0.5, "method": "ats"}, "mctf compare --flops"),
    ({"flops": 0.5, "method": "evo_vit", "blocks": [0]}, "evo"),
]


@pytest.mark.parametrize(("given", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_refused_in_one_line(given: dict[str, Any], says: str) -> None:
    model = make("plain")
    assert_refused(model, says, lambda: mctf.fuse(model, **given))
    assert_refused(model, says, lambda: mctf.plan(model, **given))
