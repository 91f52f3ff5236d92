"""DiffRate against its description, one image at a time, and its published schedules."""

import json
from importlib.resources import files
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import timm
import torch

import mctf
from helpers.models import NAMES, ONE_PER_OPS, family_of, make, make_images, run
from helpers.naive import (
    NaiveBlock,
    NaiveContext,
    assert_as_naive,
    assert_as_naive_or_refused,
    attended,
    by_falling,
    plain_block,
)
from helpers.reference import Groups, Options, Tokens, cosines
from helpers.reference_blocks import Pieces
from mctf.evaluation.match_flops import sweep_reductions
from mctf.methods.diffrate import PUBLISHED

FILE = json.loads((files("mctf") / "data_files" / "diffrate_schedules.json").read_text(encoding="utf-8"))
SCHEDULE = [9, 0.2, 11, 0.7]
PUBLISHED_BLOCK = {0: 0, 1: 5, 2: 10, 3: 11}  # the blocks of the tests' models and those of twelve
EVERY = [(size, number) for size in FILE for number in range(5)]


def feasible(schedule: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Per block of a published schedule the tokens before it, after dropping and after merging."""
    before, blocks = 197, []
    for kept, merged in zip(schedule["kept_after_pruning"], schedule["kept_after_merging"], strict=True):
        after = min(before, merged)
        blocks.append((before, min(before, kept), after))
        before = after
    return blocks


def dropped_share(size: str, index: int, removed: float) -> float:
    blocks = [feasible(schedule)[PUBLISHED_BLOCK[index]] for schedule in FILE[size]["schedules"]]
    points = sorted({(b - a) / (b - 1): (b - k) / (b - a) for b, k, a in blocks if a < b}.items())
    return float(np.interp(removed, *zip(*points, strict=True))) if points else 0.0


def naive_diffrate(*, published: str = "tiny", prune: bool = True, proportional: bool = True) -> NaiveBlock:
    options = Options(proportional=proportional)

    def block(pieces: Pieces, tokens: Tokens, ctx: NaiveContext) -> tuple[Tokens, Groups]:
        first, count = ctx.protected, len(tokens.x)
        free = count - first
        r = ctx.amount if isinstance(ctx.amount, int) else int(ctx.amount * free + 0.5)
        if r == 0:
            return plain_block(pieces, tokens, options)
        dropped = int(r * dropped_share(published, ctx.index, r / free) + 0.5) if prune else 0
        x, full_map = attended(pieces, tokens, options)
        ranked = by_falling(full_map[:, 0].mean(dim=0).tolist(), range(first, count))
        stay, leave, lost = ranked[: free - r], ranked[free - r :], ranked[free - dropped :]
        cosine = cosines(x)
        best = {i: max(stay, key=lambda j: cosine[i][j]) for i in leave}

        groups = [[i] for i in range(first)] + [[j] + [i for i in leave if best[i] == j] for j in stay]
        weights = [0.0 if i in lost else 1.0 for i in range(count)]
        rows = [x[[i for i in members if i not in lost]].mean(dim=0) for members in groups]
        result = tokens.fused(groups, weights, pieces.add_mlp(torch.stack(rows)))
        result.sizes = [
            tokens.sizes[j] + sum(tokens.sizes[i] * max(0, cosine[i][j]) for i in joined if i not in lost)
            for j, *joined in groups
        ]
        return result, groups

    return block


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ONE_PER_OPS else pytest.mark.slow) for name in NAMES]
)
@torch.no_grad()
def test_every_model_is_as_described_or_refused(name: str) -> None:
    assert_as_naive_or_refused(name, naive_diffrate(), method="diffrate", schedule=SCHEDULE)


@pytest.mark.parametrize("option", [{"published": "base"}, {"prune": False}, {"proportional": False}], ids=str)
@torch.no_grad()
def test_every_option_is_as_described(option: dict[str, Any]) -> None:
    model = make("registers", seed=1).double()
    images = make_images(model, 2)
    assert_as_naive(model, images, naive_diffrate(**option), method="diffrate", schedule=SCHEDULE, **option)
    with pytest.raises(AssertionError):
        assert_as_naive(model, images, naive_diffrate(), method="diffrate", schedule=SCHEDULE, **option)


@pytest.mark.parametrize(("size", "number"), EVERY)
def test_published_schedules_are_followed(size: str, number: int) -> None:
    """At the cost of a published schedule its token counts come out, with the share of FLOPs that was asked for."""
    with torch.device("meta"):
        model = timm.create_model(f"deit_{size}_patch16_224")
    blocks = feasible(FILE[size]["schedules"][number])
    saved = sorted((saved for saved, _ in PUBLISHED[size].kept[0][1:-1]), reverse=True)[number]
    plan = mctf.plan(model, method="diffrate", r=saved)
    assert plan.token_counts == [after for _, _, after in blocks]
    assert plan.saved == pytest.approx(saved, abs=0.003)  # comparisons of tokens are counted too
    assert plan.notes == []
    for index, (before, kept, after) in enumerate(blocks):
        dropped = (
            PUBLISHED[size].num_dropped(before - after, before - 1, index=index, depth=12) if after < before else 0
        )
        # two schedules of DeiT-T remove one token in block 1; one of them drops it
        assert dropped == before - kept or (size, number, index) == ("tiny", 1, 1)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_large_patch16_384", "deit_base_distilled_patch16_224"])
def test_the_ratio_is_the_share_of_flops_saved(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    for r in (0.1, 0.33, 0.5):
        assert mctf.plan(model, method="diffrate", r=r).saved == pytest.approx(r, abs=0.04)
    costs = [mctf.plan(model, method="diffrate", r=number / 100).gflops for number in range(100)]
    assert all(more >= less for more, less in pairwise(costs))
    assert mctf.plan(model, method="diffrate", r=0.0).saved == 0


def test_every_ratio_gives_amounts_that_a_schedule_may_hold() -> None:
    for size, depth in product(PUBLISHED, (1, 2, 3, 4, 12, 40)):
        for saved in (0.0, 5e-324, 0.1, 1 / 3, 0.42, 0.7, 0.999, 1 - 2**-53):
            amounts = PUBLISHED[size].ratios(saved, depth)
            assert len(amounts) == depth
            assert all(0 <= amount < 1 for amount in amounts)


def test_every_cost_is_within_reach_of_the_sweep() -> None:
    with torch.device("meta"):
        model = timm.create_model("deit_tiny_patch16_224")
    sweep = sweep_reductions(model, "diffrate", images=torch.empty(1, 3, 224, 224, device="meta"))
    for target in (0.5, 0.7, 0.85, 1.1):
        assert sweep.gflops(sweep.closest(target)) == pytest.approx(target, rel=0.01)


def test_the_schedule_is_that_of_the_closest_width() -> None:
    for name, size in (("plain", "tiny"), ("registers", "tiny")):
        assert mctf.fuse(make(name), "diffrate").blocks.method.published == size
    with torch.device("meta"):
        for name, size in (("vit_small_patch16_224", "small"), ("vit_large_patch16_224", "base")):
            model = timm.create_model(name)
            assert mctf.plan(model, method="diffrate") == mctf.plan(model, method="diffrate", published=size)
    tiny, base = (mctf.plan(model, method="diffrate", published=size).token_counts for size in ("tiny", "base"))
    assert tiny != base


def test_named_blocks_follow_the_schedule_alone() -> None:
    """A ratio means the same share in the blocks that are named; the others reduce nothing."""
    model = make("plain")
    whole = mctf.fuse(model, "diffrate", r=0.4).blocks.schedule
    mctf.unfuse(model)
    assert mctf.fuse(model, "diffrate", r=0.4, blocks=[2, -1]).blocks.schedule == (0, 0, *whole[2:])
    mctf.set_r(model, 0.4)
    assert model.blocks.schedule == (0, 0, *whole[2:])
    mctf.set_r(model, [1, 2, 0.25, 0])
    assert model.blocks.schedule == (1, 2, 0.25, 0)


@torch.no_grad()
def test_opposite_tokens_keep_positive_sizes() -> None:
    """Where the most similar token points away, the size does not shrink."""
    model = mctf.fuse(make("plain"), "diffrate", r=[30, 20, 8, 3], prune=False)
    with mctf.trace(model) as trace:
        assert run(model, torch.zeros(2, 3, 64, 64)).isfinite().all()
        assert run(model, 1e4 * make_images(model, 2)).isfinite().all()
    prefix = family_of(model).prefix(model)
    for block in trace.blocks:
        assert (block.sizes >= 1).all()
        assert (block.sizes[:, :prefix] == 1).all()


def test_what_makes_no_sense_is_refused() -> None:
    for options, words in (
        ({"published": "smal"}, "published='smal' is unknown: did you mean 'small'"),
        ({"published": 5}, "published=5 is unknown"),
        ({"prune": "no"}, "prune='no' must be True or False"),
        ({"proportional": None}, "proportional=None must be True or False"),
        ({"r": 1.2}, "r=1.2 is neither a whole number of tokens nor a ratio"),
        ({"r": [1, 2]}, "r has 2 entries but the model has 4 blocks"),
    ):
        with pytest.raises(mctf.MctfError, match=words):
            mctf.fuse(make("plain"), "diffrate", **options)
