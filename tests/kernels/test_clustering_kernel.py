"""Clustering by Triton against `core.clustering`: the same clusters, and the members of every slot."""

import pytest
import torch

from mctf import kernels
from mctf.core import clustering
from mctf.core.assignment import Assignment
from mctf.kernels import clustering as clustering_ops

# tokens, protected ones, r, rounds, candidates per token that joins
ONE_PROGRAM = [
    (37, 1, 8, 2, 1.5),
    (20, 0, 9, 4, 1.5),
    (51, 2, 3, 4, 2),
    (71, 1, 30, 2, 1.5),
    (18, 1, 5, 1, 1),
    (18, 1, 8, 8, 9),
    (90, 1, 40, 3, 1.5),
    (256, 0, 40, 2, 1.5),
    (140, 1, 70, 2, 1.5),
    (12, 2, 1, 2, 1.5),
]
MANY_PROGRAMS = [
    (290, 1, 50, 2, 1.5),
    (259, 2, 8, 1, 1),
    (261, 0, 120, 2, 1.5),
    (300, 1, 3, 4, 1.5),
    (90, 1, 40, 3, 9),
    (200, 1, 90, 2, 1.5),
]


def tokens(device, *, count: int, channels: int = 24, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(2, count, channels, generator=generator) + 2 * torch.randn(2, 1, channels, generator=generator)
    weights = torch.rand(2, count, generator=generator) + 0.05
    return x.to(device, dtype), weights.to(device)


@pytest.mark.parametrize(
    ("count", "protected", "r", "rounds", "candidates"),
    ONE_PROGRAM + MANY_PROGRAMS,
)
def test_clusters_are_those_of_the_plain_version(
    device, count: int, protected: int, r: int, rounds: int, candidates: float
) -> None:
    x, weights = tokens(device, count=count)
    before = weights.clone()
    most = clustering.num_candidates(r, count - protected, candidates)
    slots, order, start = clustering_ops.cluster(x, weights, r, protected, rounds, most)
    plain = clustering.cluster(
        x.double(), weights.double(), r, protected=protected, rounds=rounds, candidates=candidates
    )
    assert torch.equal(slots, plain.slots)
    expected_order, expected_start = Assignment(slots, count - r).members()
    assert torch.equal(start, expected_start)
    assert torch.equal(slots.gather(1, order.long()), slots.gather(1, expected_order.long()))
    assert torch.equal(order.sort().values, expected_order.sort().values), "in each slot the members of that slot"
    assert torch.equal(weights, before)


@pytest.mark.parametrize("count", [33, 257, 280])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reduced_precision(device, dtype: torch.dtype, count: int) -> None:
    if dtype == torch.bfloat16 and str(device) == "cpu":
        pytest.skip("the interpreter cannot multiply bfloat16 matrices")
    x, weights = tokens(device, count=count, dtype=dtype)
    r = count // 5
    slots, _, _ = clustering_ops.cluster(x, weights, r, 1, 2, clustering.num_candidates(r, count - 1, 1.5))
    plain = clustering.cluster(x.double(), weights.double(), r, protected=1, rounds=2, candidates=1.5)
    # rounding may choose among pairs of nearly equal cost: the error that clustering minimizes hardly differs
    errors = [squared_error(x.double(), weights.double(), each) for each in (Assignment(slots, count - r), plain)]
    torch.testing.assert_close(errors[0], errors[1], rtol=0.02, atol=0.0)


def squared_error(x, weights, assignment):
    """Weighted squared error of unit tokens when each is replaced by the mean of its cluster."""
    unit = x / x.norm(dim=2, keepdim=True)
    return (weights * (unit - assignment.unpool(assignment.pool(unit, weights))).square().sum(2)).sum()


def test_what_does_not_fit_is_left_to_the_plain_version(device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert clustering_ops.fits(16385, 1)
    assert not clustering_ops.fits(16386, 1)
    assert not clustering_ops.fits(40, 17)
    monkeypatch.setattr(clustering_ops, "MAX_TOKENS", 16)
    x, weights = tokens(device, count=30, channels=8)
    assignment, _, _ = kernels.cluster(x, weights[:, None], None, r=10, protected=1, rounds=2, candidates=1.5)
    assert assignment.count == 20


@pytest.mark.parametrize("count", [20, 270])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1.0])
def test_undefined_and_equal_tokens_fill_every_slot(device, count: int, value: float) -> None:
    x, weights = torch.full((2, count, 8), value, device=device), torch.full((2, count), value, device=device)
    assignment, _, _ = kernels.cluster(x, weights[:, None], None, r=6, protected=1, rounds=2, candidates=1.5)
    assert [sorted(set(slots.tolist())) for slots in assignment.slots] == [list(range(count - 6))] * 2


def test_means_with_the_norm_of_their_members(device) -> None:
    x, weights = tokens(device, count=20, channels=40)
    slots = torch.arange(20, device=device).repeat(2, 1)
    slots[:, 12:] = slots[:, :8]
    assignment = Assignment(slots, 12)
    with torch.no_grad():
        mean, context, totals = kernels.merge(x, assignment, weights=weights, also=x, keep_norm=True)
        with kernels.disable_kernels():
            expected = kernels.merge(x, assignment, weights=weights, also=x, keep_norm=True)
    torch.testing.assert_close((mean, context, totals), expected)
    norms = assignment.pool(x.norm(dim=2, keepdim=True), weights)
    torch.testing.assert_close(mean.norm(dim=2, keepdim=True), norms)
    assert torch.equal(mean[:, 8:12], x[:, 8:12]), "a token alone stays as it is"
