"""Ward's clustering against exact agglomeration in float64, one pair at a time."""

import pytest
import torch
from torch import Tensor

from mctf.core.assignment import Assignment
from mctf.core.clustering import cluster, squared_distances, token_weights


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
        assignment = cluster(squared_distances(x, protected=protected), weights, r, protected=protected, rounds=r)
        expected = [agglomerate(image, w, r, protected) for image, w in zip(x, weights, strict=True)]
        assert groups(assignment, protected) == expected


@pytest.mark.parametrize("rounds", [1, 2, 4, 8])
@pytest.mark.parametrize(("r", "protected"), [(1, 1), (3, 0), (12, 2), (14, 1)])
def test_slots(rounds: int, r: int, protected: int) -> None:
    x, weights = tokens(0)
    assignment = cluster(squared_distances(x, protected=protected), weights, r, protected=protected, rounds=rounds)
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
            assignment = cluster(squared_distances(x, protected=1), weights, 24, protected=1, rounds=rounds)
            total = total + squared_error(x, weights, assignment)
        errors.append(total.item())
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 1.1 * errors[3], "four rounds are close to exact agglomeration"


def test_distances_between_clusters_are_those_between_their_centers() -> None:
    """Rounds of one token and rounds of centers recomputed from the tokens choose the same clusters."""
    x, weights = tokens(5, batch=1, count=20)
    first = cluster(squared_distances(x, protected=0), weights, 6, protected=0, rounds=2)
    half = cluster(squared_distances(x, protected=0), weights, 3, protected=0, rounds=1)
    unit = x / x.norm(dim=2, keepdim=True)
    centers, masses = half.pool(unit, weights), half.total(weights)
    distances = (centers[:, :, None] - centers[:, None]).square().sum(3)
    second = cluster(distances, masses, 3, protected=0, rounds=1)
    assert groups(first, 0) == groups(half.compose(second), 0)


def test_light_and_similar_tokens_are_fused_first() -> None:
    x = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]])
    weights = torch.tensor([[1.0, 1.0, 0.01, 0.01]])
    assert groups(cluster(squared_distances(x, protected=0), weights, 1, protected=0, rounds=1), 0) == [
        [[0], [1], [2, 3]]
    ]


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
        assignment = cluster(squared_distances(x, protected=0), nearly, 10, protected=0, rounds=2)
        assert all(len({int(pairs[token]) for token in each}) == 1 for image in groups(assignment, 0) for each in image)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_undefined_and_equal_tokens_fill_every_slot(value: float) -> None:
    x, weights = torch.full((2, 12, 4), value), token_weights(torch.full((2, 12), value), None)
    assignment = cluster(squared_distances(x, protected=1), weights, 5, protected=1, rounds=4)
    assert [sorted(set(slots.tolist())) for slots in assignment.slots] == [list(range(7))] * 2
