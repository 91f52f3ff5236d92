"""ATS against its description: one image at a time, samples looked up one by one."""

import pytest
import timm
import torch
from torch import Tensor

import mctf
from helpers import reference
from helpers.dropping import assert_as_unpadded, dropped, run_each
from helpers.models import ONE_PER_OPS, family_of, make, make_images
from helpers.naive import (
    PLAIN,
    NaiveBlock,
    NaiveContext,
    assert_refused_for_want_of_a_class_token,
    by_falling,
    plain_block,
)
from helpers.reference import Groups, Tokens
from helpers.reference_blocks import Pieces
from mctf import MctfError
from mctf.methods.ats import sample


def naive_ats(samples: int | None = None, fewest: int = 8) -> NaiveBlock:
    def block(pieces: Pieces, tokens: Tokens, ctx: NaiveContext) -> tuple[Tokens, Groups]:
        if not ctx.amount or len(tokens.x) <= fewest:
            return plain_block(pieces, tokens)
        read = pieces.read(tokens.x)
        full_map = reference.attention_map(pieces, read, tokens, PLAIN)
        values = pieces.values(read)
        context = pieces.finish(reference.joined_heads(full_map @ values), read)

        patches = range(ctx.protected, len(tokens.x))
        significance = {j: float(full_map[:, 0, j].sum() * values[:, j].norm()) for j in patches}
        kept = naive_sample(significance, how_many(samples, ctx))
        least = fewest - ctx.protected
        if len(kept) < least:
            ranked = by_falling([significance.get(j, 0.0) for j in range(len(tokens.x))], list(patches))
            kept = set(ranked[:least])
        stay = [*range(ctx.protected), *sorted(kept)]
        x = pieces.add_mlp(pieces.add_attention(tokens.x[stay], context[stay]))
        return dropped(tokens, stay, x, ctx.protected)

    def how_many(samples: int | None, ctx: NaiveContext) -> int:
        every, patches = ctx.initial, ctx.initial - ctx.protected
        most = every if samples is None else samples
        r = ctx.amount if isinstance(ctx.amount, int) else int(ctx.amount * patches)
        return max(fewest - ctx.protected, most if r <= 1 else min(most, patches - r))

    return block


def naive_sample(significance: dict[int, float], samples: int) -> set[int]:
    """The tokens nearest to evenly spaced heights of the cumulated significance, from its smallest above 0 to 1."""
    rising = sorted(significance, key=lambda token: significance[token])
    total, height, so_far = sum(significance.values()), {}, 0.0
    for token in rising:
        so_far += significance[token] / total
        height[token] = so_far
    low, high = height[rising[0]], height[rising[-1]]
    height = {token: (value - low) / (high - low) for token, value in height.items()}
    start = min(value for value in height.values() if value > 0)
    levels = [start + (1 - start) * index / (samples - 1) for index in range(samples)]
    return {min(rising, key=lambda token: abs(height[token] - level)) for level in levels}


@pytest.mark.parametrize("name", ONE_PER_OPS)
@torch.no_grad()
def test_every_model_is_as_described_or_refused(name: str) -> None:
    model = make(name).double()
    if family_of(model).prefix(model) == 0:
        assert_refused_for_want_of_a_class_token(model, "ats")
        return
    schedule, images = [0, 1, 0, 1], make_images(model, 3)
    expected = run_each(model, images, naive_ats(), schedule)
    mctf.fuse(model, "ats", r=schedule, restore="copy")
    counts = assert_as_unpadded(model, images, expected)
    if name != "post_norm":  # without a norm before it, attention is so sharp that eight tokens remain of any image
        assert len({tuple(each) for each in counts}) > 1  # padding is tested


SCHEDULES = [[1, 1, 1, 1], [0, 20, 20, 20], [0.3, 0, 0.6, 0], [60, 1, 1, 1], [0, 0, 0.99, 0.99]]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("samples", [None, 30])
@torch.no_grad()
def test_every_r_and_number_of_samples_is_as_described(schedule: list[float], samples: int | None) -> None:
    model = make("registers", seed=1).double()
    images = make_images(model, 3)
    expected = run_each(model, images, naive_ats(samples), schedule)
    mctf.fuse(model, "ats", r=schedule, samples=samples)
    counts = assert_as_unpadded(model, images, expected)
    most = mctf.plan(model, method="ats", r=schedule, samples=samples).token_counts
    assert all(count <= bound for each in counts for count, bound in zip(each, most, strict=True))
    assert min(min(each) for each in counts) >= 8


@torch.no_grad()
def test_the_comparison_can_fail() -> None:
    model = make("plain").double()
    images = make_images(model, 2)
    expected = run_each(model, images, naive_ats(samples=40), [0, 1, 1, 1])
    mctf.fuse(model, "ats", r=[0, 1, 1, 1])
    with pytest.raises(AssertionError):
        assert_as_unpadded(model, images, expected)


class TestSampling:
    def test_a_token_with_all_the_significance_answers_alone(self) -> None:
        significance = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
        assert sample(significance, torch.ones(1, 4).bool(), 9).tolist() == [[False, True, False, False]]

    def test_equal_tokens_all_answer_but_the_first(self) -> None:
        found = sample(torch.ones(1, 8), torch.ones(1, 8).bool(), 200)
        assert found.tolist() == [[False] + [True] * 7]

    def test_few_samples_take_few_tokens(self) -> None:
        generator = torch.Generator().manual_seed(0)
        significance = torch.rand(5, 50, generator=generator)
        for samples in (1, 2, 10, 40):
            counts = sample(significance, torch.ones(5, 50).bool(), samples).sum(dim=1)
            assert ((counts >= 1) & (counts <= samples)).all()

    def test_padding_never_answers_and_changes_nothing(self) -> None:
        generator = torch.Generator().manual_seed(1)
        significance = torch.rand(1, 20, generator=generator, dtype=torch.float64)
        padded = torch.cat([significance, torch.full((1, 5), 0.5, dtype=torch.float64)], dim=1)
        there = torch.arange(25)[None] < 20
        expected = sample(significance, torch.ones(1, 20).bool(), 15)
        found = sample(padded, there, 15)
        assert torch.equal(found[:, :20], expected)
        assert not found[:, 20:].any()

    @pytest.mark.parametrize("significance", [[[0.0, 0.0, 0.0]], [[1e-40, 1e-42, 1e-41]], [[1.0, 0.0, 1e-30]]])
    def test_vanishing_significance_still_gives_somebody(self, significance: Tensor) -> None:
        assert sample(torch.tensor(significance), torch.ones(1, 3).bool(), 4).any()

    def test_a_single_token_answers(self) -> None:
        assert sample(torch.tensor([[0.3, 0.5]]), torch.tensor([[True, False]]), 4).tolist() == [[True, False]]


def test_the_published_blocks_and_samples() -> None:
    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224")
    plan = mctf.plan(model, method="ats")
    assert plan.token_counts == [197] * 3 + [196 - block for block in range(9)]
    assert plan.notes == ["the number of kept tokens depends on the image: token counts and GFLOPs are upper bounds"]
    assert mctf.plan(model, method="ats", r=96).token_counts[3:5] == [101, 100]
    capped = mctf.plan(model, method="ats", r=0.99).notes[0]
    assert capped == "blocks 3 to 11: r=194, then 5 capped to 189, then 0 (too few tokens left)"


@pytest.mark.parametrize("samples", [0, -1, True, 2.5, "all"])
def test_numbers_of_samples_that_make_no_sense_are_refused(samples: object) -> None:
    with pytest.raises(MctfError, match=r"samples=.* must be a whole number from 1 on, or None"):
        mctf.fuse(make("plain"), "ats", samples=samples)
