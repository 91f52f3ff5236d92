"""Matching by Triton against the plain matching on float64 scores."""

import pytest
import torch

from mctf import kernels
from mctf.core import criteria, matching
from mctf.kernels import matching_op

from .conftest import poisoned

CASES = [(2, 37, 48, 1, 7), (1, 197, 192, 1, 16), (2, 60, 16, 2, 29), (1, 21, 8, 0, 10), (1, 40, 100, 5, 3)]
LARGE = [(2, 300, 40, 1, 91), (1, 577, 64, 1, 201), (1, 262, 16, 2, 1), (1, 260, 24, 0, 130)]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setattr(matching_op, "_outputs", poisoned(matching_op._outputs))


@pytest.mark.parametrize("taus", [criteria.Criteria(), criteria.Criteria(2.0, 0.0, 0.1)])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_slots_and_members(case, sized, bidirectional, taus, device):
    check_slots_and_members(case, sized, bidirectional, taus, device)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("case", LARGE)
def test_slots_and_members_of_many_tokens(case, bidirectional, device):
    taus = criteria.Criteria() if bidirectional else criteria.Criteria(2.0, 0.0, 0.1)
    check_slots_and_members(case, bidirectional, bidirectional, taus, device)


def check_slots_and_members(case, sized, bidirectional, taus, device):
    batch, tokens, channels, protected, r = case
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(batch, tokens, channels, generator=generator).to(device)
    a = torch.rand(batch, tokens, generator=generator).to(device)
    sizes = torch.randint(1, 5, (batch, tokens), generator=generator).float().to(device) if sized else None
    found = kernels.match(x, a, sizes, taus, r=r, protected=protected, bidirectional=bidirectional)

    wide = None if sizes is None else sizes.double()
    scores = criteria.attraction(x.double(), a.double(), wide, taus, protected=protected)
    by = matching.match_bidirectional if bidirectional else matching.match_one_way
    expected = by(scores, r, protected=protected)
    assert torch.equal(found.slots, expected.slots)
    assert found.count == expected.count
    order, start = expected.members()
    assert torch.equal(found.start, start)
    assert torch.equal(found.slots.gather(1, found.order.long()), expected.slots.gather(1, order.long()))
    assert torch.equal(found.order.sort(dim=1).values, torch.arange(tokens, device=device).expand(batch, -1).int())


@pytest.mark.parametrize("tokens", [20, 290])
def test_equal_scores_fall_by_index(tokens, device):
    x = torch.ones(1, tokens, 8, device=device)
    a = torch.full((1, tokens), 0.05, device=device)
    found = kernels.match(x, a, None, criteria.Criteria(), r=6, protected=1, bidirectional=True)
    scores = criteria.attraction(x, a, None, criteria.Criteria(), protected=1)
    assert torch.equal(found.slots, matching.match_bidirectional(scores, 6, protected=1).slots)


@pytest.mark.parametrize("way", [{"ONE_PROGRAM": 0}, {"_ALONE": 0}], ids=["many programs", "scores by many"])
@pytest.mark.parametrize(("batch", "tokens", "channels", "protected", "r"), CASES)
def test_all_ways_match_alike(batch, tokens, channels, protected, r, way, device, monkeypatch):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(batch, tokens, channels, generator=generator).to(device)
    a = torch.rand(batch, tokens, generator=generator).to(device)
    arguments = {"r": r, "protected": protected, "bidirectional": True}
    monkeypatch.setattr(matching_op, "_ALONE", matching_op.ONE_PROGRAM)
    by_one = kernels.match(x, a, None, criteria.Criteria(), **arguments)
    for name, value in way.items():
        monkeypatch.setattr(matching_op, name, value)
    other = kernels.match(x, a, None, criteria.Criteria(), **arguments)
    assert torch.equal(other.slots, by_one.slots)
    assert torch.equal(other.start, by_one.start)


@pytest.mark.parametrize(("batch", "launches"), [(1, ["scores_kernel", "matching_kernel"]), (2, ["matching_kernel"])])
def test_a_single_image_takes_two_launches(batch, launches, device, monkeypatch):
    seen = []
    plain = matching_op.launchable
    monkeypatch.setattr(matching_op, "launchable", lambda kernel: seen.append(kernel.__name__) or plain(kernel))
    x, a = torch.randn(batch, 197, 16, device=device), torch.rand(batch, 197, device=device)
    kernels.match(x, a, None, criteria.Criteria(), r=16, protected=1, bidirectional=True)
    assert seen == launches


@pytest.mark.parametrize(
    ("tokens", "protected", "fits"), [(4097, 1, True), (4098, 1, False), (60, 17, False), (2, 1, False)]
)
def test_what_does_not_fit_is_left_to_plain_matching(tokens, protected, fits):
    assert matching_op.fits(tokens, protected) == fits
