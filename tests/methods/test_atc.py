"""ATC against its description, one image at a time, and its token counts."""

import math
from itertools import combinations
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import mctf
from helpers.models import NAMES, ONE_PER_OPS, make, make_images
from helpers.naive import NaiveBlock, NaiveContext, assert_as_naive, fused_by_size, plain_block
from helpers.reference import Groups, Options, Tokens, cosines
from helpers.reference_blocks import Pieces
from mctf.core.agglomeration import LINKAGES, agglomerate

SCHEDULE = [0.3, 0, 11, 0.5]
LINKED = {"average": lambda pairs: sum(pairs) / len(pairs), "single": min, "complete": max}


def naive_clusters(distances: list[list[float]], merges: int, linkage: str) -> Groups:
    """The closest two clusters become one, by the distances of all pairs of their tokens."""
    clusters = [[i] for i in range(len(distances))]
    for _ in range(merges):
        one, other = min(
            combinations(clusters, 2),
            key=lambda pair: LINKED[linkage]([distances[i][j] for i in pair[0] for j in pair[1]]),
        )
        clusters = sorted([*(each for each in clusters if each not in (one, other)), sorted(one + other)])
    return clusters


def naive_atc(*, linkage: str = "average", proportional: bool = True) -> NaiveBlock:
    options = Options(proportional=proportional)

    def block(pieces: Pieces, tokens: Tokens, ctx: NaiveContext) -> tuple[Tokens, Groups]:
        if ctx.amount == 0:
            return plain_block(pieces, tokens, options)
        first, free = ctx.protected, len(tokens.x) - ctx.protected
        stage = ctx.kept["stage"] = ctx.kept.get("stage", 0) + 1
        if isinstance(ctx.amount, int):
            r = ctx.amount
        else:
            r = free - math.floor((ctx.initial - first) * (1 - ctx.amount) ** stage + 1e-9)

        def grouped(keys: Tensor) -> Groups:
            distances = [[1 - cosine for cosine in row] for row in cosines(keys[first:])]
            clusters = naive_clusters(distances, r, linkage)
            return [[i] for i in range(first)] + [[first + i for i in cluster] for cluster in clusters]

        return fused_by_size(pieces, tokens, options, grouped)

    return block


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ONE_PER_OPS else pytest.mark.slow) for name in NAMES]
)
@torch.no_grad()
def test_every_model_is_as_described(name: str) -> None:
    model = make(name).double()
    assert_as_naive(model, make_images(model, 1), naive_atc(), method="atc", schedule=[0.1, 0, 5, 0.3])


@pytest.mark.parametrize("option", [{"linkage": "single"}, {"linkage": "complete"}, {"proportional": False}], ids=str)
@torch.no_grad()
def test_every_option_is_as_described(option: dict[str, Any]) -> None:
    model = make("registers", seed=1).double()
    images = make_images(model, 1)
    assert_as_naive(model, images, naive_atc(**option), method="atc", schedule=SCHEDULE, **option)
    with pytest.raises(AssertionError):
        assert_as_naive(model, images, naive_atc(), method="atc", schedule=SCHEDULE, **option)


def groups(roots: Tensor) -> Groups:
    return [[i for i, root in enumerate(roots.tolist()) if root == label] for label in roots.unique().tolist()]


@pytest.mark.parametrize("linkage", LINKAGES)
def test_clusters_are_those_of_the_description(linkage: str) -> None:
    generator = torch.Generator().manual_seed(2)
    points = torch.randn(3, 15, 4, generator=generator, dtype=torch.float64)
    distances = torch.cdist(points, points)
    for merges in (0, 1, 6, 11, 14):
        for image, roots in enumerate(agglomerate(distances, merges, linkage)):
            assert groups(roots) == naive_clusters(distances[image].tolist(), merges, linkage)
            assert all(root == roots[root] for root in roots)


@pytest.mark.parametrize("linkage", LINKAGES)
def test_equal_tokens_leave_no_cluster_empty(linkage: str) -> None:
    for distances in (torch.zeros(2, 12, 12), torch.cdist(*[torch.randn(2, 3, 4).repeat(1, 4, 1)] * 2)):
        for merges in range(12):
            for roots in agglomerate(distances, merges, linkage):
                assert len(roots.unique()) == 12 - merges


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("undefined", [float("nan"), float("inf"), float("-inf")])
def test_undefined_distances_leave_no_cluster_empty(linkage: str, undefined: float) -> None:
    rows, every = torch.zeros(2, 8, 8), torch.full((2, 8, 8), undefined)
    rows[0, 3], rows[0, :, 3] = undefined, undefined
    for distances in (rows, every):
        for merges in range(8):
            for roots in agglomerate(distances, merges, linkage):
                assert len(roots.unique()) == 8 - merges


def test_the_input_of_the_operator_stays_as_it_is() -> None:
    distances = torch.rand(1, 6, 6)
    before = distances.clone()
    agglomerate(distances, 3, "average")
    assert torch.equal(distances, before)


@pytest.mark.slow
def test_the_operator_is_one_that_compilers_know() -> None:
    torch.library.opcheck(agglomerate, (torch.rand(2, 6, 6), 3, "average"))


def test_counts_are_floors_of_the_first_count() -> None:
    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224")
    for keep in (0.9, 0.7, 0.5, 0.25):
        plan = mctf.plan(model, method="atc", r=1 - keep)
        expected = [1 + math.floor(196 * keep**stage + 1e-9) for stage in (1, 2, 3)]
        assert [plan.token_counts[block] for block in (2, 3, 6, 9, 11)] == [197, *expected, expected[-1]]
        assert plan.notes == []


def test_at_least_one_cluster_remains() -> None:
    plan = mctf.plan(make("plain"), method="atc", r=[1000, 0, 0, 0])
    assert plan.token_counts == [2] * 4
    assert "capped" in plan.notes[0]


def test_what_makes_no_sense_is_refused() -> None:
    for options, words in (
        ({"linkage": "avrage"}, "linkage='avrage' is unknown: did you mean 'average'"),
        ({"linkage": 3}, "linkage=3 is unknown"),
        ({"proportional": 1}, "proportional=1 must be True or False"),
    ):
        with pytest.raises(mctf.MctfError, match=words):
            mctf.fuse(make("plain"), "atc", **options)
