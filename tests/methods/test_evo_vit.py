"""Evo-ViT against its description, one image at a time, and its published costs."""

import copy
from typing import Any

import pytest
import torch

import mctf
from helpers import reference
from helpers.flops import EXACT, counted
from helpers.models import ONE_PER_OPS, by_pickle, family_of, make, make_images, run, tokens_of
from helpers.naive import (
    PLAIN,
    NaiveBlock,
    NaiveContext,
    assert_as_naive,
    assert_as_naive_or_refused,
    assert_images_do_not_meet,
    assert_r_0_is_plain,
    attended,
    by_falling,
    run_naive,
)
from helpers.reference import Groups, Tokens
from helpers.reference_blocks import Pieces
from helpers.refusals import assert_refused

SCHEDULE = [0, 0.5, 0.5, 0.5]


def naive_evo_vit(stages: tuple[int, ...]) -> NaiveBlock:
    """Blocks in `stages` choose, and any block that is to leave another number behind than the one before it."""

    def block(pieces: Pieces, tokens: Tokens, ctx: NaiveContext) -> tuple[Tokens, Groups]:
        count, first, known = len(tokens.x), ctx.protected, ctx.kept
        alone = [[i] for i in range(count)]
        free = count - first
        waiting = min(ctx.amount if isinstance(ctx.amount, int) else int(ctx.amount * free), free - 1)
        if waiting == 0:
            seen = reference.received(attended(pieces, tokens)[1], "class", first)
            old = known["attention"] if "inside" in known else seen  # nothing of the past before the first choice
            known["attention"] = [(was + is_) / 2 for was, is_ in zip(old, seen, strict=True)]
            if "inside" in known:
                known["inside"] = None
            return reference.whole_block(pieces, tokens, PLAIN), alone
        inside = known.get("inside")
        if inside is None or len(inside) != count - waiting or ctx.index in stages:
            ranked = by_falling(known["attention"], range(first, count))
            inside = known["inside"] = [*range(first), *sorted(ranked[: free - waiting])]
        part = Tokens(tokens.x[inside], [1.0] * len(inside), [tokens.cover[i] for i in inside])
        seen = reference.received(attended(pieces, part)[1], "class", first)
        known["attention"] = list(known["attention"])
        for place, value in zip(inside, seen, strict=True):
            known["attention"][place] = (known["attention"][place] + value) / 2
        x = tokens.x.clone()
        x[inside] = reference.whole_block(pieces, part, PLAIN).x
        return Tokens(x, tokens.sizes, tokens.cover), alone

    return block


@pytest.mark.parametrize("name", ONE_PER_OPS)
@torch.no_grad()
def test_every_model_is_as_described_or_refused(name: str) -> None:
    assert_as_naive_or_refused(name, naive_evo_vit((1, 3)), method="evo_vit", schedule=SCHEDULE)


@pytest.mark.parametrize("schedule", [[0, 20, 30, 0.25], [0, 0.9, 0, 0.5], [0, 0, 1000, 1]], ids=str)
@torch.no_grad()
def test_any_schedule_is_as_described(schedule: list[Any]) -> None:
    model = make("registers").double()
    assert_as_naive(model, make_images(model, 2), naive_evo_vit((1, 3)), method="evo_vit", schedule=schedule)


@torch.no_grad()
def test_other_stages_would_be_noticed() -> None:
    model = make("plain").double()
    with pytest.raises(AssertionError):
        assert_as_naive(model, make_images(model, 1), naive_evo_vit((1, 2, 3)), method="evo_vit", schedule=SCHEDULE)


@torch.no_grad()
def test_training_may_choose_in_every_block() -> None:
    model = make("plain").double()
    tokens = family_of(model).embed(model, make_images(model, 1))
    expected = run_naive(model, tokens[0], SCHEDULE, naive_evo_vit((1, 2, 3))).tokens
    mctf.fuse(model, "evo_vit", r=SCHEDULE, every_block=True)
    torch.testing.assert_close(model.train().blocks(tokens)[0], expected, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(model.eval().blocks(tokens)[0], expected, atol=1e-3)


@pytest.mark.parametrize(("name", "gflops"), [("deit_tiny_patch16_224", 0.8), ("deit_small_patch16_224", 3.0)])
def test_the_published_setting(name: str, gflops: float) -> None:
    plan = mctf.plan(name, method="evo_vit")
    assert plan.token_counts == [197] * 12
    assert [step.num_reduced for step in plan.reductions] == [0] * 4 + [98] * 8
    assert plan.gflops == pytest.approx(gflops, abs=0.1)
    assert plan.learned_parameters == 0


@torch.no_grad()
def test_twelve_blocks_choose_at_the_fifth_and_the_ninth() -> None:
    model = make("plain", depth=12).double()
    assert_as_naive(model, make_images(model, 1), naive_evo_vit((4, 8)), method="evo_vit", schedule=[0] * 4 + [0.5] * 8)


@pytest.mark.parametrize("name", ["registers", "eva02"])
@torch.no_grad()
def test_what_holds_for_every_method(name: str) -> None:
    model = make(name)
    images = make_images(model, 3)
    assert_r_0_is_plain(model, images, "evo_vit")
    plan = mctf.plan(model, method="evo_vit")
    mctf.fuse(model, "evo_vit")
    with mctf.trace(model) as trace:
        fused = run(model, images)
    assert trace.token_counts == plan.token_counts == [tokens_of(model)] * 4
    assert plan.gflops < plan.gflops_base
    assert counted(model, images) == pytest.approx(plan.gflops_run, rel=EXACT)
    for twin in (copy.deepcopy(model), by_pickle(model)):
        assert torch.equal(run(twin, images), fused)
    assert_images_do_not_meet(model.double(), images.double())


@pytest.mark.slow
@torch.no_grad()
def test_one_graph_equals_eager() -> None:
    torch.compiler.reset()
    model = make("registers", depth=3)
    images = make_images(model, 2)
    mctf.fuse(model, "evo_vit")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images), model(images), atol=1e-5, rtol=1e-5)


def test_gradients_reach_every_parameter() -> None:
    model = mctf.fuse(make("layer_scale").train(), "evo_vit")
    model(make_images(model, 2)).square().sum().backward()
    assert all(parameter.grad.any() and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_first_block_that_has_nothing_to_choose_by_is_refused() -> None:
    model = make("plain")
    message = "the attention of the block before: r must be 0 in block 0"
    assert_refused(model, message, lambda: mctf.fuse(model, "evo_vit", r=[0.5] * 4))
    assert_refused(model, message, lambda: mctf.plan(model, method="evo_vit", r=[0.5] * 4))
    mctf.fuse(model, "evo_vit")
    assert_refused(model, message, lambda: mctf.set_r(model, [0.5] * 4))
