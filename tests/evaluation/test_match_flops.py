"""r that brings a method to a target cost: by its plan, or measured where each image decides."""

from itertools import pairwise

import pytest
import timm
import torch
from torch import nn

import mctf
from mctf import MctfError
from mctf.evaluation.adaptive_flops import mean_tokens
from mctf.evaluation.match_flops import ReductionSweep, sweep_reductions
from mctf.methods import make_method

TARGET = 0.024  # GFLOPs; test_vit has 0.038
TOLERANCE = 0.02  # one token of test_vit, which has a hundred, is about one percent of a block


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=3).eval()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(4, 3, 160, 160, generator=torch.Generator().manual_seed(1))


def swept(tiny: nn.Module, images: torch.Tensor, method: str) -> ReductionSweep:
    sweep = sweep_reductions(tiny, method, images=images)
    assert sweep is not None
    return sweep


@pytest.mark.parametrize("method", ["tome", "evit", "dynamic_vit", "evo_vit", "random"])
def test_a_plan_is_brought_to_the_target(tiny: nn.Module, images: torch.Tensor, method: str) -> None:
    r = swept(tiny, images, method).closest(TARGET)
    assert mctf.plan(tiny, method=method, r=r).gflops == pytest.approx(TARGET, rel=TOLERANCE)
    assert isinstance(r, float) == isinstance(make_method(method, {}).default_r, float)


@pytest.mark.parametrize("method", ["mctf", "evit"])
def test_no_other_step_is_closer(tiny: nn.Module, images: torch.Tensor, method: str) -> None:
    sweep = swept(tiny, images, method)
    chosen = sweep.closest(TARGET)
    index = list(sweep.reductions).index(chosen)
    best = min(abs(sweep.gflops(r) - TARGET) for r in sweep.reductions[index - 10 : index + 11])
    assert abs(sweep.gflops(chosen) - TARGET) == best


def test_steps_differ_by_one_token_and_use_the_methods_blocks(tiny: nn.Module, images: torch.Tensor) -> None:
    sweep = swept(tiny, images, "mctf")
    assert sweep.reductions[0] == (0, 1, 0, 0, 0, 0)
    assert sweep.reductions[4] == 1
    assert sweep.reductions[6] == (0, 2, 2, 1, 1, 1)
    assert all(before >= after for before, after in pairwise(map(sweep.gflops, sweep.reductions[5:60:5])))


def test_the_closer_side_is_chosen_above_or_below() -> None:
    sweep = ReductionSweep("some", (1, 2, 3), {1: 3.0, 2: 2.0, 3: 1.0}.__getitem__)
    assert [sweep.closest(target) for target in (3.0, 2.6, 2.4, 1.6, 1.4, 1.0)] == [1, 1, 2, 2, 3, 3]


def test_targets_out_of_bounds_are_refused_with_the_bounds() -> None:
    sweep = ReductionSweep("some", (1, 2), {1: 3.0, 2: 2.0}.__getitem__)
    for target in (1.9, 3.1):
        with pytest.raises(MctfError, match=rf"some cannot cost {target} GFLOPs .* from 2\.000 to 3\.000"):
            sweep.closest(target)


def test_where_images_decide_the_cost_is_measured(tiny: nn.Module, images: torch.Tensor) -> None:
    sweep = swept(tiny, images, "ats")
    r = sweep.closest(TARGET)
    fused = timm.create_model("test_vit", num_classes=3).eval()
    fused.load_state_dict(tiny.state_dict())
    measured = mean_tokens(mctf.fuse(fused, "ats", r=r), [images]).gflops
    assert measured == pytest.approx(TARGET, rel=TOLERANCE)
    assert measured == sweep.gflops(r)
    assert measured < mctf.plan(tiny, method="ats", r=r).gflops


@pytest.mark.parametrize("method", ["a_vit", "ia_red2"])
def test_a_cost_that_does_not_depend_on_r_has_no_sweep(tiny: nn.Module, images: torch.Tensor, method: str) -> None:
    assert sweep_reductions(tiny, method, images=images) is None
