"""Matching by Triton against the plain matching on float64 scores."""

import pytest
import torch

from helpers.kernels import poisoned, record_launches
from mctf import kernels
from mctf.core import attention, matching
from mctf.kernels import matching as matching_ops

CASES = [
    (2, 37, 48, 1, 7),
    (1, 197, 192, 1, 16),
    (2, 60, 16, 2, 29),
    (1, 21, 8, 0, 10),
    (1, 40, 100, 5, 3),
    (1, 197, 16, 1, 97),
    (2, 255, 16, 1, 60),
    (2, 257, 16, 1, 100),
]
LARGE = [(2, 262, 40, 1, 91), (1, 577, 64, 1, 201), (1, 262, 16, 2, 1), (1, 260, 24, 0, 130)]
TAUS = [matching.Criteria(), matching.Criteria(2.0, 0.0, 0.1)]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setattr(matching_ops, "_allocate_outputs", poisoned(matching_ops._allocate_outputs))


# each shape twice; every pair of the three options occurs, and each option with most shapes
OPTIONS = [(sized, bidirectional, taus) for sized in (True, False) for bidirectional in (True, False) for taus in TAUS]
PAIRS = [(case, OPTIONS[(3 * i + 5 * j) % 8]) for i, case in enumerate(CASES) for j in range(2)]


@pytest.mark.parametrize(("case", "options"), PAIRS, ids=str)
def test_slots_and_members(case, options, device):
    check_slots_and_members(case, *options, device)


@pytest.mark.parametrize(
    ("case", "bidirectional"),
    [(LARGE[0], True), pytest.param(LARGE[1], False, marks=pytest.mark.slow), (LARGE[2], True), (LARGE[3], False)],
)
def test_slots_and_members_of_many_tokens(case, bidirectional, device):
    check_slots_and_members(case, bidirectional, bidirectional, TAUS[not bidirectional], device)


def decision_margin(scores, r, bidirectional):
    """The smallest relative difference of two float64 scores whose order decides the matching."""
    r_alpha = r // 2 if bidirectional else r
    strength = scores.amax(dim=2)
    merged = matching.rank_descending(strength) < r_alpha
    decided = [scores.topk(2, dim=2).values] if r_alpha else []
    if 0 < r_alpha < strength.shape[1]:
        decided += [strength.topk(r_alpha + 1, dim=1).values[:, -2:]]
    if bidirectional:
        kept = scores.masked_fill(merged[:, :, None], float("-inf")).transpose(1, 2)
        decided += [kept.topk(2, dim=2).values, kept.amax(dim=2).sort(dim=1, descending=True).values.unfold(1, 2, 1)]
    return min(((pair[..., 0] - pair[..., 1]) / pair[..., 0]).min().item() for pair in decided)


def matching_inputs(case, sized, bidirectional, taus, device):
    """x, received and sizes without near-ties, so that float32 decides as float64; and the scores in float64."""
    batch, tokens, channels, protected, r = case
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, tokens, channels, generator=generator)
        received = torch.rand(batch, 3, tokens, generator=generator)
        sizes = torch.randint(1, 5, (batch, tokens), generator=generator).float() if sized else None
        a, wide = received.double().sum(dim=1), None if sizes is None else sizes.double()
        scores = matching.pair_scores(x.double(), a, wide, taus, protected=protected)
        if decision_margin(scores, r, bidirectional) > 4e-6:  # rounding in float32: below 1e-6
            return x.to(device), received.to(device), None if sizes is None else sizes.to(device), scores.to(device)
    raise AssertionError("all of 50 seeds give near-ties")


def check_slots_and_members(case, sized, bidirectional, taus, device):
    batch, tokens, _, protected, r = case
    x, received, sizes, scores = matching_inputs(case, sized, bidirectional, taus, device)
    actual, a = kernels.match(x, received, sizes, taus, r=r, protected=protected, bidirectional=bidirectional)
    torch.testing.assert_close(a.double(), received.double().sum(dim=1), rtol=1e-6, atol=0)
    by = matching.match_bidirectional if bidirectional else matching.match_one_way
    expected = by(scores, r, protected=protected)
    assert torch.equal(actual.slots, expected.slots)
    assert actual.count == expected.count
    order, start = expected.members()
    assert torch.equal(actual.start, start)
    assert torch.equal(actual.slots.gather(1, actual.order.long()), expected.slots.gather(1, order.long()))
    assert torch.equal(actual.order.sort(dim=1).values, torch.arange(tokens, device=device).expand(batch, -1).int())


@pytest.mark.parametrize("tokens", [20, 270])
def test_ties_are_broken_by_index(tokens, device):
    x = torch.ones(1, tokens, 8, device=device)
    a = torch.full((1, tokens), 0.05, device=device)
    actual, _ = kernels.match(x, a[:, None], None, matching.Criteria(), r=6, protected=1, bidirectional=True)
    scores = matching.pair_scores(x, a, None, matching.Criteria(), protected=1)
    assert torch.equal(actual.slots, matching.match_bidirectional(scores, 6, protected=1).slots)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3], CASES[5]])
def test_one_program_and_many_agree(case, bidirectional, device, monkeypatch):
    x, received, _, _ = matching_inputs(case, False, bidirectional, TAUS[0], device)
    results = []
    for side in (matching_ops.MAX_ONE_PROGRAM, 0):
        monkeypatch.setattr(matching_ops, "MAX_ONE_PROGRAM_SINGLE_IMAGE", side)
        monkeypatch.setattr(matching_ops, "MAX_ONE_PROGRAM", side)
        options = {"r": case[4], "protected": case[3], "bidirectional": bidirectional}
        results.append(kernels.match(x, received, None, TAUS[0], **options))
    (one, one_a), (many, many_a) = results
    assert torch.equal(one.slots, many.slots)
    assert torch.equal(one.start, many.start)
    torch.testing.assert_close(one_a, many_a, rtol=1e-6, atol=0)


MANY = ["scores_kernel", "alpha_merges_kernel", "beta_partners_kernel", "slots_kernel", "members_kernel"]


@pytest.mark.parametrize(
    ("batch", "tokens", "launches"), [(1, 197, MANY), (1, 99, ["matching_kernel"]), (2, 131, ["matching_kernel"])]
)
def test_a_single_image_takes_many_programs(batch, tokens, launches, device, monkeypatch):
    launched = record_launches(monkeypatch, matching_ops)
    x, received = torch.randn(batch, tokens, 16, device=device), torch.rand(batch, 1, tokens, device=device)
    kernels.match(x, received, None, matching.Criteria(), r=16, protected=1, bidirectional=True)
    assert launched == launches


@pytest.mark.parametrize(("tokens", "protected"), [(20, 0), (21, 1), (270, 1)])
def test_pairs_of_score_0_still_have_partners(tokens, protected, device):
    x = torch.ones(2, tokens, 4, device=device)
    x[:, 1::2] *= -1  # a cosine of -1, whose square is less than a float32 can hold
    a = torch.full((2, tokens), 0.05, device=device)
    taus = matching.Criteria(tau_sim=2.0)
    actual, _ = kernels.match(x, a[:, None], None, taus, r=6, protected=protected, bidirectional=True)
    scores = matching.pair_scores(x, a, None, taus, protected=protected)
    assert torch.equal(actual.slots, matching.match_bidirectional(scores, 6, protected=protected).slots)
    assert torch.equal(actual.start, actual.members()[1])
    assert torch.equal(actual.order.sort(dim=1).values, torch.arange(tokens, device=device).expand(2, -1).int())


def test_norms_far_apart(device):
    x = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(1)).to(device)
    x[:, ::2] *= 1e-17
    a = torch.full((2, 24), 0.04, device=device)
    sizes = torch.ones(2, 24, device=device)
    sizes[:, 20:] = 0  # padding, which has no influence where sizes are no criterion
    taus = matching.Criteria(1.0, 0.05, 0.0)
    actual, _ = kernels.match(x, a[:, None], sizes, taus, r=8, protected=0, bidirectional=True)
    scores = matching.pair_scores(x.double(), a.double(), sizes.double(), taus, protected=0)
    assert decision_margin(scores, 8, True) > 4e-6
    assert torch.equal(actual.slots, matching.match_bidirectional(scores, 8, protected=0).slots)


@pytest.mark.parametrize(("tokens", "bidirectional"), [(60, True), (60, False), (270, True)])
def test_nan_tokens_still_get_a_slot_each(tokens, bidirectional, device):
    x = torch.randn(2, tokens, 16, device=device)
    x[0, 5:11] = float("nan")
    x[1] = float("nan")
    received = torch.rand(2, 4, tokens, device=device)
    actual, _ = kernels.match(x, received, None, matching.Criteria(), r=9, protected=1, bidirectional=bidirectional)
    assert torch.equal(actual.order.sort(dim=1).values, torch.arange(tokens, device=device).expand(2, -1).int())
    assert ((actual.slots >= 0) & (actual.slots < tokens - 9)).all()


@pytest.mark.parametrize("tokens", [20, 270])
def test_informativeness_is_above_0(tokens, device):
    x, received = torch.randn(2, tokens, 8, device=device), torch.rand(2, 2, tokens, device=device)
    received[:, :, [0, 4]] = 0
    _, a = kernels.match(x, received, None, matching.Criteria(), r=4, protected=1, bidirectional=True)
    assert torch.equal(a, attention.total_received(received))
    assert (a[:, [0, 4]] > 0).all()


@pytest.mark.parametrize(
    ("tokens", "protected", "fits"), [(4097, 1, True), (4098, 1, False), (60, 17, False), (2, 1, False)]
)
def test_what_fits(tokens, protected, fits):
    assert matching_ops.fits(tokens, protected) == fits
