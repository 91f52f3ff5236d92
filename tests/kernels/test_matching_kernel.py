"""Matching by Triton against the plain matching on float64 scores."""

import pytest
import torch

from helpers.kernels import poisoned, record_launches
from mctf import kernels
from mctf.core import matching
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
LARGE = [(2, 300, 40, 1, 91), (1, 577, 64, 1, 201), (1, 262, 16, 2, 1), (1, 260, 24, 0, 130)]
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


@pytest.mark.parametrize(("case", "bidirectional"), list(zip(LARGE, [True, False, True, False], strict=True)))
def test_slots_and_members_of_many_tokens(case, bidirectional, device):
    check_slots_and_members(case, bidirectional, bidirectional, TAUS[not bidirectional], device)


def check_slots_and_members(case, sized, bidirectional, taus, device):
    batch, tokens, channels, protected, r = case
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(batch, tokens, channels, generator=generator).to(device)
    received = torch.rand(batch, 3, tokens, generator=generator).to(device)
    sizes = torch.randint(1, 5, (batch, tokens), generator=generator).float().to(device) if sized else None
    found, a = kernels.match(x, received, sizes, taus, r=r, protected=protected, bidirectional=bidirectional)

    expected_a = received.double().sum(dim=1)
    torch.testing.assert_close(a.double(), expected_a, rtol=1e-6, atol=0)
    wide = None if sizes is None else sizes.double()
    scores = matching.pair_scores(x.double(), expected_a, wide, taus, protected=protected)
    by = matching.match_bidirectional if bidirectional else matching.match_one_way
    expected = by(scores, r, protected=protected)
    assert torch.equal(found.slots, expected.slots)
    assert found.count == expected.count
    order, start = expected.members()
    assert torch.equal(found.start, start)
    assert torch.equal(found.slots.gather(1, found.order.long()), expected.slots.gather(1, order.long()))
    assert torch.equal(found.order.sort(dim=1).values, torch.arange(tokens, device=device).expand(batch, -1).int())


@pytest.mark.parametrize("tokens", [20, 290])
def test_ties_are_broken_by_index(tokens, device):
    x = torch.ones(1, tokens, 8, device=device)
    a = torch.full((1, tokens), 0.05, device=device)
    found, _ = kernels.match(x, a[:, None], None, matching.Criteria(), r=6, protected=1, bidirectional=True)
    scores = matching.pair_scores(x, a, None, matching.Criteria(), protected=1)
    assert torch.equal(found.slots, matching.match_bidirectional(scores, 6, protected=1).slots)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("batch", "tokens", "channels", "protected", "r"), [CASES[0], CASES[2], CASES[3], CASES[5]])
def test_one_program_and_many_agree(batch, tokens, channels, protected, r, bidirectional, device, monkeypatch):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(batch, tokens, channels, generator=generator).to(device)
    received = torch.rand(batch, 2, tokens, generator=generator).to(device)
    found = []
    for side in (matching_ops.MAX_ONE_PROGRAM, 0):
        monkeypatch.setattr(matching_ops, "MAX_ONE_PROGRAM_SINGLE_IMAGE", side)
        monkeypatch.setattr(matching_ops, "MAX_ONE_PROGRAM", side)
        arguments = {"r": r, "protected": protected, "bidirectional": bidirectional}
        found.append(kernels.match(x, received, None, matching.Criteria(), **arguments))
    (one, one_a), (many, many_a) = found
    assert torch.equal(one.slots, many.slots)
    assert torch.equal(one.start, many.start)
    assert torch.equal(one_a, many_a)


MANY = ["scores_kernel", "alpha_merges_kernel", "beta_partners_kernel", "slots_kernel", "members_kernel"]


@pytest.mark.parametrize(
    ("batch", "tokens", "launches"), [(1, 197, MANY), (1, 99, ["matching_kernel"]), (2, 131, ["matching_kernel"])]
)
def test_a_single_image_takes_many_programs(batch, tokens, launches, device, monkeypatch):
    launched = record_launches(monkeypatch, matching_ops)
    x, received = torch.randn(batch, tokens, 16, device=device), torch.rand(batch, 1, tokens, device=device)
    kernels.match(x, received, None, matching.Criteria(), r=16, protected=1, bidirectional=True)
    assert launched == launches


@pytest.mark.parametrize("tokens", [20, 290])
@pytest.mark.parametrize("protected", [0, 1])
def test_pairs_of_score_0_still_have_partners(tokens, protected, device):
    x = torch.ones(2, tokens, 4, device=device)
    x[:, 1::2] *= -1  # a cosine of -1, whose square is less than a float32 can hold
    a = torch.full((2, tokens), 0.05, device=device)
    taus = matching.Criteria(tau_sim=2.0)
    found, _ = kernels.match(x, a[:, None], None, taus, r=6, protected=protected, bidirectional=True)
    scores = matching.pair_scores(x, a, None, taus, protected=protected)
    assert torch.equal(found.slots, matching.match_bidirectional(scores, 6, protected=protected).slots)
    assert torch.equal(found.start, found.members()[1])
    assert torch.equal(found.order.sort(dim=1).values, torch.arange(tokens, device=device).expand(2, -1).int())


def test_norms_far_apart(device):
    x = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(1)).to(device)
    x[:, ::2] *= 1e-17
    a = torch.full((2, 24), 0.04, device=device)
    sizes = torch.ones(2, 24, device=device)
    sizes[:, 20:] = 0  # padding, which has no influence where sizes are no criterion
    taus = matching.Criteria(1.0, 0.05, 0.0)
    found, _ = kernels.match(x, a[:, None], sizes, taus, r=8, protected=0, bidirectional=True)
    scores = matching.pair_scores(x.double(), a.double(), sizes.double(), taus, protected=0)
    assert torch.equal(found.slots, matching.match_bidirectional(scores, 8, protected=0).slots)


@pytest.mark.parametrize("tokens", [60, 290])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_nan_tokens_still_get_a_slot_each(tokens, bidirectional, device):
    x = torch.randn(2, tokens, 16, device=device)
    x[0, 5:11] = float("nan")
    x[1] = float("nan")
    received = torch.rand(2, 4, tokens, device=device)
    found, _ = kernels.match(x, received, None, matching.Criteria(), r=9, protected=1, bidirectional=bidirectional)
    assert torch.equal(found.order.sort(dim=1).values, torch.arange(tokens, device=device).expand(2, -1).int())
    assert ((found.slots >= 0) & (found.slots < tokens - 9)).all()


@pytest.mark.parametrize("tokens", [20, 290])
def test_informativeness_is_above_0(tokens, device):
    x, received = torch.randn(2, tokens, 8, device=device), torch.rand(2, 2, tokens, device=device)
    received[:, :, [0, 4]] = 0
    _, a = kernels.match(x, received, None, matching.Criteria(), r=4, protected=1, bidirectional=True)
    assert torch.equal(a, matching.total_received(received))
    assert (a[:, [0, 4]] > 0).all()


@pytest.mark.parametrize(
    ("tokens", "protected", "fits"), [(4097, 1, True), (4098, 1, False), (60, 17, False), (2, 1, False)]
)
def test_what_fits(tokens, protected, fits):
    assert matching_ops.fits(tokens, protected) == fits
