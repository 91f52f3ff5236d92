"""What a setting will cost, without running the model."""

import json

import pytest
import timm
import torch

import mctf
from helpers.models import make, make_images

TINY = "deit_tiny_patch16_224"


def test_token_counts_of_the_paper() -> None:
    plan = mctf.plan(TINY)
    assert plan.image_tokens == 197
    assert plan.token_counts == [197 - 16 * block for block in range(12)]
    assert plan.model == TINY
    assert (plan.method, plan.r, plan.notes) == ("mctf", 16, [])
    assert len(plan.block_gflops) == 12
    assert plan.saved == pytest.approx(1 - plan.gflops / plan.gflops_base)


def test_notes_where_r_had_to_be_capped() -> None:
    plan = mctf.plan(TINY, r=20)
    assert plan.token_counts[-4:] == [37, 19, 10, 10]  # half of those that are not protected leave; ten remain
    assert plan.capped == [9, 10, 11]
    assert plan.notes == ["blocks 9 to 11: r=20 capped to 18, 9, 0 (too few tokens left)"]
    (note,) = mctf.plan(TINY, r=1000).notes
    assert note == "blocks 1 to 11: r=1000 capped to 98, 49, 24, 12, 4, then 0 (too few tokens left)"
    (note,) = mctf.plan(TINY, r=0.9).notes
    words = "r=176, 88, 44, 22, 11, then 8 capped to 98, 49, 24, 12, 4, then 0"
    assert note == f"blocks 1 to 11: {words} (too few tokens left)"
    assert mctf.plan(TINY, r=[0, 100] + [0] * 10).notes == ["block 1: r=100 capped to 98 (too few tokens left)"]


def test_methods_differ_in_where_they_fuse() -> None:
    assert mctf.plan(TINY, method="tome").token_counts == [197 - 16 * block for block in range(1, 12)] + [11]
    assert mctf.plan(TINY, r=8, blocks=iter([0, -1])).token_counts == [189] * 11 + [181]


def test_the_fast_preset() -> None:
    fast = mctf.plan(TINY, r="fast")
    assert fast.token_counts == mctf.plan(TINY, r=0.35, blocks=(3, 6, 9)).token_counts
    assert fast.token_counts == [197] * 3 + [129] * 3 + [85] * 3 + [56] * 3


def test_the_table_says_it_all() -> None:
    lines = str(mctf.plan(TINY, r=20)).splitlines()
    assert lines[0] == "deit_tiny_patch16_224, mctf r=20"
    assert lines[1].split() == ["block", "tokens", "in", "fused", "tokens", "out", "GFLOPs"]
    assert len(lines) == 2 + 12 + 1 + 1
    assert [line.split()[:4] for line in lines[2:5]] == [
        ["0", "197", "0", "197"],
        ["1", "197", "20", "177"],
        ["2", "177", "20", "157"],
    ]
    assert lines[14] == "0.60 GFLOPs of 1.26 (52% saved)"
    assert lines[15] == "note: blocks 9 to 11: r=20 capped to 18, 9, 0 (too few tokens left)"


def test_as_dict_is_json() -> None:
    answer = json.loads(json.dumps(mctf.plan(TINY, r=[0] + [20] * 11).as_dict()))
    assert answer["token_counts"][-1] == 10
    assert answer["r"] == [0] + [20] * 11
    assert set(answer) >= {"model", "method", "gflops", "gflops_base", "gflops_run", "saved", "notes"}


@pytest.mark.parametrize(("size", "tokens"), [(384, 577), ((224, 448), 393), (None, 197)])
def test_image_sizes_by_name(size: object, tokens: int) -> None:
    assert mctf.plan(TINY, image_size=size).image_tokens == tokens


def test_image_sizes_of_a_model() -> None:
    assert mctf.plan(make("dynamic"), image_size=(64, 80)).image_tokens == 81
    assert mctf.plan(make("dynamic"), image_size=[72, 72]).image_tokens == 82
    assert mctf.plan(make("odd")).image_tokens == 82


def test_blocks_add_up() -> None:
    plan = mctf.plan(make("plain"), r=8)
    base = mctf.plan(make("plain"), r=0)
    around = base.gflops - sum(base.block_gflops)
    norm = 5 * 48 * 24 / 1e9  # the final norm sees 24 tokens fewer
    assert plan.gflops == pytest.approx(around - norm + sum(plan.block_gflops))
    assert base.gflops == base.gflops_base == base.gflops_run
    assert base.saved == 0


def test_published_costs_leave_out_lv_vit_s_second_head() -> None:
    plan = mctf.plan("lvvit_s", r=0)
    assert plan.gflops == plan.gflops_base
    assert plan.saved == 0
    assert plan.gflops_run - plan.gflops == pytest.approx(196 * 384 * 1000 / 1e9)  # patches, channels, classes
    fused = mctf.plan("lvvit_s", r=8)
    assert fused.gflops_base == plan.gflops_base
    assert fused.gflops == pytest.approx(4.93, abs=0.02)


@torch.no_grad()
def test_planning_changes_nothing_and_needs_no_run() -> None:
    model = make("plain")
    images = make_images(model, 1)
    plain = model(images)
    mctf.plan(model, r=8)
    assert torch.equal(model(images), plain)
    with torch.device("meta"):
        empty = timm.create_model("vit_base_patch16_224")
    assert mctf.plan(empty).token_counts[-1] == 21


@pytest.mark.parametrize("method", ["mctf", "tome"])
def test_a_fused_model_can_be_planned(method: str) -> None:
    model = make("registers")
    before = mctf.plan(model, method=method, r=8)
    mctf.fuse(model, method, r=8)
    assert mctf.plan(model, method=method, r=8) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_does_not_matter(dtype: torch.dtype) -> None:
    assert mctf.plan(make("plain").to(dtype), r=8) == mctf.plan(make("plain"), r=8)
