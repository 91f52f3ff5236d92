"""BAT against its description, one image at a time, and its published token counts and costs."""

import math
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import mctf
from helpers.models import ONE_PER_OPS, make, make_images
from helpers.naive import (
    NaiveBlock,
    NaiveContext,
    assert_as_naive,
    assert_as_naive_or_refused,
    attended,
    by_falling,
    plain_block,
)
from helpers.reference import Groups, Tokens, cosines
from helpers.reference_blocks import Pieces
from mctf import MctfError
from mctf.methods import make_method

SCHEDULE = [0.3, 0, 11, 0.5]
SHARES = {"clusters": 0.1, "pairs": 0.1, "lower": 0.5, "neighbours": 5}


def share_of(asked: float, count: int) -> int:
    return asked if isinstance(asked, int) else math.floor(asked * count + 1e-9)


def naive_bat(**options: Any) -> NaiveBlock:
    meant = {**SHARES, **options}

    def block(pieces: Pieces, tokens: Tokens, ctx: NaiveContext) -> tuple[Tokens, Groups]:
        first, count = ctx.protected, len(tokens.x)
        free = count - first
        if ctx.amount == 0:
            return plain_block(pieces, tokens)
        remaining = free - ctx.amount if isinstance(ctx.amount, int) else math.ceil((1 - ctx.amount) * free - 1e-9) + 1
        x, full_map = attended(pieces, tokens)
        a = full_map[:, 0].mean(dim=0).tolist()
        clusters = max(1, min(remaining - 1, share_of(meant["clusters"], remaining)))
        pairs = min(share_of(meant["pairs"], remaining), free - remaining, remaining - clusters)
        attentive = remaining - clusters + pairs
        lower = min(attentive, max(2 * pairs, share_of(meant["lower"], attentive))) if pairs else 0

        ranked = by_falling(a, range(first, count))
        groups = [[i] for i in [*range(first), *ranked[: attentive - lower]]]
        groups += fused_pairs(x, ranked[attentive - lower : attentive], pairs, place=len(groups))
        groups += density_peaks(x, ranked[attentive:], clusters, meant["neighbours"])
        rows = [sum(a[i] * x[i] for i in members) / sum(a[i] for i in members) for members in groups]
        return tokens.fused(groups, a, pieces.add_mlp(torch.stack(rows))), groups

    return block


def fused_pairs(x: Tensor, lower: list[int], pairs: int, *, place: int) -> Groups:
    """Tokens in even places (the first is at `place`) look for the most similar in odd ones; the best `pairs` join."""
    even = [i for number, i in enumerate(lower, start=place) if number % 2 == 0]
    odd = [i for number, i in enumerate(lower, start=place) if number % 2 == 1]
    if pairs == 0:
        return [[i] for i in lower]
    cosine = cosines(x)
    best = {i: max(odd, key=lambda j: cosine[i][j]) for i in even}
    leaving = sorted(even, key=lambda i: -cosine[i][best[i]])[:pairs]
    alone = [[i] for i in even if i not in leaving]
    return alone + [[j] + [i for i in leaving if best[i] == j] for j in odd]


def density_peaks(x: Tensor, tokens: list[int], clusters: int, neighbours: int) -> Groups:
    if clusters >= len(tokens):
        return [[i] for i in tokens]
    distance = {(i, j): float((x[i] - x[j]).square().mean().sqrt()) for i in tokens for j in tokens}
    rho, delta = {}, {}
    for i in tokens:
        near = sorted(distance[i, j] ** 2 for j in tokens if j != i)[:neighbours]
        rho[i] = math.exp(-sum(near) / len(near))
    for i in tokens:
        denser = [distance[i, j] for j in tokens if rho[j] > rho[i]]  # no two are equal in these tests
        delta[i] = min(denser) if denser else max(distance[i, j] for j in tokens)
    centres = sorted(tokens, key=lambda i: -rho[i] * delta[i])[:clusters]
    home = {i: i if i in centres else min(centres, key=lambda centre: distance[i, centre]) for i in tokens}
    return [[i for i in tokens if home[i] == centre] for centre in centres]


@pytest.mark.parametrize("name", ONE_PER_OPS)
@torch.no_grad()
def test_every_model_is_as_described_or_refused(name: str) -> None:
    assert_as_naive_or_refused(name, naive_bat(), method="bat", schedule=SCHEDULE)


OPTIONS: list[dict[str, Any]] = [
    {"clusters": 0.4, "pairs": 0.3},
    {"clusters": 0, "pairs": 0},
    {"clusters": 7, "pairs": 9, "lower": 0},
    {"pairs": 5, "lower": 1000},
    {"clusters": 0.999, "pairs": 0.9},
    {"clusters": 12, "neighbours": 2},
    {"clusters": 3, "neighbours": 1000},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_every_split_of_the_budget_is_as_described(options: dict[str, Any]) -> None:
    model = make("registers", seed=1).double()
    assert_as_naive(
        model, make_images(model, 1), naive_bat(**options), method="bat", schedule=[0, 20, 9, 0.3], **options
    )


@pytest.mark.parametrize("option", [{"clusters": 0.5}, {"pairs": 0.4}, {"lower": 0.9}, {"neighbours": 2}], ids=str)
@torch.no_grad()
def test_the_comparison_notices_every_option(option: dict[str, Any]) -> None:
    model = make("plain").double()
    images, schedule = make_images(model, 2), [0.3, 0.3, 0, 0.3]
    with pytest.raises(AssertionError):
        assert_as_naive(model, images, naive_bat(), method="bat", schedule=schedule, **option)


@pytest.mark.parametrize(
    ("name", "gflops"), [("deit_tiny_patch16_224", 0.8), ("deit_small_patch16_224", 3.0), ("lvvit_s", 4.7)]
)
def test_the_published_setting_costs_what_evit_does(name: str, gflops: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    plan = mctf.plan(model, method="bat")
    assert plan.gflops == pytest.approx(gflops, abs=0.1)
    assert plan.token_counts == mctf.plan(model, method="evit").token_counts
    assert 0 < plan.gflops_run - plan.gflops < 0.04
    assert plan.notes == []


@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
def test_a_budget_adds_up(options: dict[str, Any]) -> None:
    method = make_method("bat", options)
    for free in (2, 3, 10, 64, 196):
        for r in {0, 1, free // 3, free // 2, free - 2} - {free - 1}:
            budget = method.budget(free, r)
            assert budget.untouched + budget.lower + budget.inattentive == free
            assert budget.untouched + budget.lower - budget.pairs + budget.clusters == free - r
            assert budget.lower >= 2 * budget.pairs
            assert budget.inattentive >= budget.clusters >= 1
            assert min(budget.untouched, budget.pairs) >= 0


@torch.no_grad()
def test_equal_tokens_leave_no_slot_empty() -> None:
    """Where all tokens are one and the same, every centre still has a cluster of its own."""
    model = make("plain", pos_embed="none")
    mctf.fuse(model, "bat", r=[0, 20, 10, 5], clusters=0.5)
    with mctf.trace(model) as trace:
        assert model(torch.ones(2, 3, 64, 64)).isfinite().all()
    for block in trace.blocks:
        for slots in block.assignment.slots:
            assert slots.unique().tolist() == list(range(block.tokens))


def test_what_makes_no_sense_is_refused() -> None:
    for options, words in (
        ({"clusters": -1}, "clusters=-1 is neither a count"),
        ({"pairs": 1.5}, "pairs=1.5 is neither a count"),
        ({"lower": True}, "lower=True is neither a count"),
        ({"neighbours": 0}, "neighbours=0 must be a whole number"),
    ):
        with pytest.raises(MctfError, match=words):
            mctf.fuse(make("plain"), "bat", **options)
