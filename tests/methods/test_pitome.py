"""PiToMe against its description, one image at a time, and its token counts."""

import math
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import mctf
from helpers.models import NAMES, ONE_PER_OPS, make, make_images
from helpers.naive import NaiveBlock, NaiveContext, assert_as_naive, by_falling, fused_by_size, plain_block
from helpers.reference import Groups, Options, Tokens, cosines
from helpers.reference_blocks import Pieces

SCHEDULE = [0.2, 9, 0.3, 0.1]


def naive_pitome(*, margin: float = 0.75, proportional: bool = True, depth: int = 4) -> NaiveBlock:
    options = Options(proportional=proportional)

    def block(pieces: Pieces, tokens: Tokens, ctx: NaiveContext) -> tuple[Tokens, Groups]:
        count = len(tokens.x)
        free = range(ctx.protected, count)
        r = ctx.amount if isinstance(ctx.amount, int) else math.floor(ctx.amount * len(free) + 1e-9)
        if r == 0:
            return plain_block(pieces, tokens, options)

        def grouped(keys: Tensor) -> Groups:
            alike = margin - margin * ctx.index / depth
            energy, cosine = [0.0] * count, cosines(keys)
            for i in free:
                terms = [cosine[i][j] - alike for j in free]
                energy[i] = sum(term if term > 0 else math.exp(term) - 1 for term in terms) / len(terms)
            ranked = by_falling(energy, free)
            if ctx.index >= math.ceil(depth / 2):
                ranked = ranked[: 2 * r]
            first, second = ranked[::2], ranked[1::2]
            best = {i: max(second, key=lambda j: cosine[i][j]) for i in first}
            leaving = sorted(first, key=lambda i: -cosine[i][best[i]])[:r]
            stay = [i for i in range(count) if i not in leaving]
            return [[i] + [j for j in leaving if best[j] == i] for i in stay]

        return fused_by_size(pieces, tokens, options, grouped)

    return block


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ONE_PER_OPS else pytest.mark.slow) for name in NAMES]
)
@torch.no_grad()
def test_every_model_is_as_described(name: str) -> None:
    model = make(name).double()
    assert_as_naive(model, make_images(model, 1), naive_pitome(), method="pitome", schedule=SCHEDULE)


@pytest.mark.parametrize("option", [{"margin": 0.2}, {"proportional": False}], ids=str)
@torch.no_grad()
def test_every_option_is_as_described(option: dict[str, Any]) -> None:
    model = make("registers", seed=1).double()
    images = make_images(model, 1)
    assert_as_naive(model, images, naive_pitome(**option), method="pitome", schedule=SCHEDULE, **option)
    with pytest.raises(AssertionError):
        assert_as_naive(model, images, naive_pitome(), method="pitome", schedule=SCHEDULE, **option)


def test_a_constant_ratio_stays_in_every_block() -> None:
    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224")
    plan, patches = mctf.plan(model, method="pitome", r=0.075), 196
    for count in plan.token_counts:
        patches -= math.floor(0.075 * patches)
        assert count == 1 + patches
    assert plan.notes == []


def test_what_makes_no_sense_is_refused() -> None:
    for options, words in (
        ({"margin": 2}, "margin=2 must be a finite number, from 0 to 1"),
        ({"margin": float("nan")}, "margin=nan must be"),
        ({"proportional": "no"}, "proportional='no' must be True or False"),
    ):
        with pytest.raises(mctf.MctfError, match=words):
            mctf.fuse(make("plain"), "pitome", **options)
