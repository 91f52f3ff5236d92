"""Ward's clustering against exact agglomeration in float64, one pair at a time."""

import pytest
import torch
from torch import Tensor

from mctf.core.assignment import Assignment
from mctf.core.clustering import cluster, joining_per_round, token_weights

ALL = 1e9  # candidates: every token


def agglomerate(x: Tensor, weights: Tensor, r: int, protected: int) -> list[list[int]]:
    """Clusters of one image (N C): the pair that adds least to the weighted squared error is fused, r times."""
    center = [row / row.norm() for row in x[protected:].double()]
    weight = weights[protected:].double().tolist()
    members = {token: [token] for token in range(len(center))}
    for _ in range(r):
        costs = {
            (i, j): weight[i] * weight[j] / (weight[i] + weight[j]) * (center[i] - center[j]).square().sum().item()
            for i in members
            for j in members
            if i < j
        }
        i, j = min(costs, key=costs.__getitem__)
        total = weight[i] + weight[j]
        center[i] = (weight[i] * center[i] + weight[j] * center[j]) / total
        weight[i] = total
        members[i] += members.pop(j)
    return sorted(sorted(each) for each in members.values())


def groups(assignment: Assignment, protected: int) -> list[list[list[int]]]:
    """Clusters of every image, protected tokens left out."""
    images = []
    for slots in assignment.slots[:, protected:].tolist():
        members: dict[int, list[int]] = {}
        for token, slot in enumerate(slots):
            members.setdefault(slot, []).append(token)
        images.append(sorted(members.values()))
    return images


def tokens(seed: int, *, batch: int = 3, count: int = 30, channels: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, count, channels, generator=generator, dtype=torch.float64)
    x += torch.randn(batch, 1, channels, generator=generator, dtype=torch.float64)
    return x, torch.rand(batch, count, generator=generator, dtype=torch.float64) + 0.1


@pytest.mark.parametrize(("r", "protected"), [(1, 1), (5, 0), (14, 2), (27, 1)])
def test_one_token_per_round_is_exact_agglomeration(r: int, protected: int) -> None:
    for seed in range(3):
        x, weights = tokens(seed)
        assignment = cluster(x, weights, r, protected=protected, rounds=r, candidates=ALL)
        expected = [agglomerate(image, w, r, protected) for image, w in zip(x, weights, strict=True)]
        assert groups(assignment, protected) == expected


@pytest.mark.parametrize("rounds", [1, 2, 4, 8])
@pytest.mark.parametrize(("r", "protected"), [(1, 1), (3, 0), (12, 2), (14, 1)])
def test_slots(rounds: int, r: int, protected: int) -> None:
    x, weights = tokens(0)
    assignment = cluster(x, weights, r, protected=protected, rounds=rounds, candidates=1.5)
    assert assignment.count == 30 - r
    for slots in assignment.slots:
        assert slots[:protected].tolist() == list(range(protected))
        assert sorted(set(slots.tolist())) == list(range(30 - r)), "every slot has a token"


def squared_error(x: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
    """Weighted squared error of unit tokens when each is replaced by the mean of its cluster."""
    unit = x / x.norm(dim=2, keepdim=True)
    means = assignment.unpool(assignment.pool(unit, weights))
    return (weights * (unit - means).square().sum(2)).sum()


def test_more_rounds_lose_less() -> None:
    errors = []
    for rounds in (1, 2, 4, 24):
        total = torch.zeros(())
        for seed in range(8):
            x, weights = tokens(seed, count=60)
            assignment = cluster(x, weights, 24, protected=1, rounds=rounds, candidates=ALL)
            total = total + squared_error(x, weights, assignment)
        errors.append(total.item())
    assert errors == sorted(errors, reverse=True)
    assert errors[1] < 1.1 * errors[3], "two rounds are close to exact agglomeration"


def test_candidates_are_enough() -> None:
    """The error with one and a half candidates per token that joins is that with all tokens as candidates."""
    errors = []
    for candidates in (1.5, ALL):
        total = torch.zeros(())
        for seed in range(8):
            x, weights = tokens(seed, count=60)
            assignment = cluster(x, weights, 20, protected=1, rounds=2, candidates=candidates)
            total = total + squared_error(x, weights, assignment)
        errors.append(total.item())
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


def test_later_rounds_compare_the_centers_of_clusters() -> None:
    """Two rounds choose what two clusterings do, the second one of centers and sums of weights."""
    x, weights = tokens(5, batch=1, count=20)
    both = cluster(x, weights, 6, protected=0, rounds=2, candidates=ALL)
    first = cluster(x, weights, 4, protected=0, rounds=1, candidates=ALL)
    unit = x / x.norm(dim=2, keepdim=True)
    centers, masses = first.pool(unit, weights), first.total(weights)
    costs = (centers[:, :, None] - centers[:, None]).square().sum(3) / (1 / masses[:, :, None] + 1 / masses[:, None])
    costs.masked_fill_(masses[:, None] <= masses[:, :, None], float("inf"))
    joining = costs.amin(2).topk(2, dim=1, largest=False).indices
    costs[:, :, joining[0]] = float("inf")
    roots = torch.arange(16)[None].scatter(1, joining, costs[0, joining].argmin(2))
    second = Assignment.of_roots(roots, 14, protected=0)
    assert groups(both, 0) == groups(first.compose(second), 0)


@pytest.mark.parametrize("r", [1, 2, 7, 24, 100])
def test_joining_per_round(r: int) -> None:
    for rounds in (1, 2, 3, 4, 64, 200):
        counts = list(joining_per_round(r, rounds))
        assert sum(counts) == r
        assert min(counts) >= 1
        assert len(counts) == min(r, rounds)
    assert list(joining_per_round(30, 2)) == [20, 10]
    assert list(joining_per_round(r, r)) == [1] * r


def test_light_and_similar_tokens_are_fused_first() -> None:
    x = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]])
    weights = torch.tensor([[1.0, 1.0, 0.01, 0.01]])
    assignment = cluster(x, weights, 1, protected=0, rounds=1, candidates=1.5)
    assert groups(assignment, 0) == [[[0], [1], [2, 3]]]


def test_the_weight_of_a_token() -> None:
    a, sizes = torch.tensor([[0.2, 0.1]]), torch.tensor([[1.0, 4.0]])
    assert torch.equal(token_weights(a, None), a)
    torch.testing.assert_close(token_weights(a, sizes), torch.tensor([[0.2, 0.2]]))


def test_equal_tokens_of_nearly_equal_weight_find_each_other() -> None:
    x, weights = tokens(1, count=20)
    pairs = torch.arange(20).roll(7) // 2
    x, weights = x[:, pairs], weights[:, pairs]
    for seed in range(5):
        steps = torch.randint(-3, 4, weights.shape, generator=torch.Generator().manual_seed(seed))
        nearly = weights * (1 + steps * torch.finfo(weights.dtype).eps)
        assignment = cluster(x, nearly, 10, protected=0, rounds=2, candidates=1.5)
        assert all(len({int(pairs[token]) for token in each}) == 1 for image in groups(assignment, 0) for each in image)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_undefined_and_equal_tokens_fill_every_slot(value: float) -> None:
    x, weights = torch.full((2, 12, 4), value), token_weights(torch.full((2, 12), value), None)
    assignment = cluster(x, weights, 5, protected=1, rounds=2, candidates=1.5)
    assert [sorted(set(slots.tolist())) for slots in assignment.slots] == [list(range(7))] * 2
