"""Pair scores against the formula, and bipartite matching against loops over pairs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import reference
from mctf.core.assignment import Assignment
from mctf.core.matching import TINY, Criteria, alpha, beta, match_bidirectional, match_one_way, pair_scores, unit_rows

many = settings(max_examples=150)
WAYS = {match_bidirectional: reference.match_both_ways, match_one_way: reference.match_one_way}
every_way = pytest.mark.parametrize("match", WAYS)


@st.composite
def cases(draw: st.DrawFn, values: int) -> tuple[Tensor, int, int]:
    """Scores of 2 images, r, and the number of protected tokens; few different values make many ties."""
    protected = draw(st.integers(0, 5))
    free = draw(st.integers(2, 21))
    r = draw(st.integers(1, free // 2))
    even, odd = reference.sides(protected + free, protected)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    scores = torch.randint(values, (2, len(even), len(odd)), generator=generator).double() / values
    return scores, r, protected


def as_groups(assignment: Assignment, image: int) -> list[set[int]]:
    groups: list[set[int]] = [set() for _ in range(assignment.count)]
    for token, slot in enumerate(assignment.slots[image].tolist()):
        groups[slot].add(token)
    return groups


def expected_groups(match: object, scores: Tensor, r: int, protected: int) -> list[set[int]]:
    tokens = protected + sum(scores.shape)
    even, odd = reference.sides(tokens, protected)
    score = {(i, j): float(scores[a, b]) for a, i in enumerate(even) for b, j in enumerate(odd)}
    return [set(members) for members in WAYS[match](score, tokens, r, protected)]


def assert_as_loops_find(match, scores: Tensor, r: int, protected: int) -> None:
    assignment = match(scores, r, protected=protected)
    for image in range(2):
        assert as_groups(assignment, image) == expected_groups(match, scores[image], r, protected)


@every_way
@many
@given(case=cases(values=10**9))
def test_matching_is_what_loops_find(match, case: tuple[Tensor, int, int]) -> None:
    assert_as_loops_find(match, *case)


@every_way
@many
@given(case=cases(values=3))
def test_ties_go_to_the_first(match, case: tuple[Tensor, int, int]) -> None:
    assert_as_loops_find(match, *case)


@every_way
@many
@given(case=cases(values=50))
def test_every_slot_is_used_and_prefixes_stay(match, case: tuple[Tensor, int, int]) -> None:
    scores, r, protected = case
    tokens = protected + scores.shape[1] + scores.shape[2]
    assignment = match(scores, r, protected=protected)
    assert assignment.slots.shape == (2, tokens)
    assert assignment.slots.dtype == torch.int64
    assert assignment.count == tokens - r
    for image in range(2):
        groups = as_groups(assignment, image)
        assert all(groups)
        assert groups[:protected] == [{token} for token in range(protected)]


@pytest.mark.parametrize("protected", range(6))
@pytest.mark.parametrize("tokens", [9, 10, 15, 16])
def test_sides_alternate_by_place(tokens: int, protected: int) -> None:
    places = torch.arange(tokens).expand(1, -1)
    even, odd = reference.sides(tokens, protected)
    assert alpha(places, protected).tolist() == [even]
    assert beta(places, protected).tolist() == [odd]


def test_several_tokens_may_share_a_target() -> None:
    scores = torch.tensor([[[0.9, 0.1], [0.8, 0.2], [0.1, 0.3]]])  # tokens 0 2 4 to tokens 1 3
    assignment = match_one_way(scores, 2, protected=0)
    assert as_groups(assignment, 0) == [{4}, {0, 1, 2}, {3}]


def test_a_leaving_beta_takes_along_what_it_absorbed() -> None:
    # 0 goes to 1, the strongest pair of all; then 1 goes to 2, carrying 0.
    scores = torch.tensor([[[0.9, 0.1], [0.8, 0.2], [0.3, 0.3]]])
    assignment = match_bidirectional(scores, 2, protected=0)
    assert as_groups(assignment, 0) == [{0, 1, 2}, {4}, {3}]


def test_remaining_betas_are_ordered_by_strength() -> None:
    scores = torch.tensor([[[0.1, 0.7, 0.4, 0.9], [0.0, 0.0, 0.0, 0.0], [0.2, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    assignment = match_bidirectional(scores, 1, protected=0)
    # token 7 is the strongest and goes to 0; the others follow as 3 (0.7), 5 (0.4), 1 (0.2)
    assert as_groups(assignment, 0) == [{0, 7}, {2}, {4}, {6}, {3}, {5}, {1}]


temperatures = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.01, 3))


@settings(max_examples=50)
@given(
    taus=st.builds(Criteria, tau_sim=temperatures, tau_info=temperatures, tau_size=temperatures),
    tokens=st.integers(4, 12),
    protected=st.integers(0, 2),
    sized=st.booleans(),
)
def test_pair_scores_are_the_product_of_three_criteria(
    taus: Criteria, tokens: int, protected: int, sized: bool
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(2, tokens, 5, generator=generator, dtype=torch.float64)
    a = torch.rand(2, tokens, generator=generator, dtype=torch.float64) + 0.01
    s = torch.randint(1, 5, (2, tokens), generator=generator).double()
    found = pair_scores(x, a, s if sized else None, taus, protected=protected)
    even = [i for i in range(0, tokens, 2) if i >= protected]
    odd = [j for j in range(1, tokens, 2) if j >= protected]
    assert found.shape == (2, len(even), len(odd))
    for image in range(2):
        for row, i in enumerate(even):
            for column, j in enumerate(odd):
                cosine = torch.cosine_similarity(x[image, i], x[image, j], dim=0).item()
                expected = ((cosine + 1) / 2) ** taus.tau_sim
                expected *= (1 / (a[image, i] * a[image, j]).item()) ** taus.tau_info
                if sized:
                    expected *= (1 / (s[image, i] * s[image, j]).item()) ** taus.tau_size
                assert found[image, row, column].item() == pytest.approx(expected, rel=1e-6)


def test_a_pair_nobody_looks_at_attracts_most() -> None:
    x = torch.ones(1, 4, 3)
    a = torch.tensor([[0.4, 0.4, 0.0, 0.2]])  # token 2 underflowed
    found = pair_scores(x, a, None, Criteria(), protected=0)
    assert found.isfinite().all()
    assert found.argmax() == 3  # tokens 2 and 3
    assert found[0, 1, 1].item() == pytest.approx((1 / (TINY * 0.2)) ** (1 / 20), rel=1e-4)


def test_opposite_tokens_do_not_attract() -> None:
    x = torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [1.0, 1e-9], [1.0, 0.0]]])
    for tau in (0.5, 1.0, 3.0):
        found = pair_scores(x, torch.ones(1, 4), None, Criteria(tau_sim=tau), protected=0)
        assert found.isfinite().all()
        torch.testing.assert_close(found[0], torch.tensor([[0.0, 1.0], [0.0, 1.0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_have_at_least_the_precision_of_float32(dtype: torch.dtype) -> None:
    x = torch.randn(1, 6, 4).to(dtype)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert unit_rows(x).dtype == expected
    assert pair_scores(x, torch.ones(1, 6), None, Criteria(), protected=1).dtype == expected


def test_unit_rows() -> None:
    x = torch.tensor([[[3.0, 4.0], [0.0, 0.0], [1e-8, 0.0], [1e15, 1e15]]])
    half = math.sqrt(0.5)
    torch.testing.assert_close(unit_rows(x)[0], torch.tensor([[0.6, 0.8], [0.0, 0.0], [1.0, 0.0], [half, half]]))
