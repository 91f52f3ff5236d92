"""Operations of exported graphs compute what the plain ones do, in float64, on every model and method."""

from typing import Any

import pytest
import torch
from torch import Tensor

import mctf
from helpers.models import DEPTH, NAMES, ONE_PER_OPS, make, make_images, run
from mctf.core import clustering, matching, portable
from mctf.core.assignment import Assignment

EXPORTED = ("mctf", "mctf_exact", "ward", "tome", "evit", "pitome", "diffrate", "bat")


@pytest.fixture
def exporting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that switches to the operations of exported graphs."""
    return lambda: monkeypatch.setattr(portable, "exporting", lambda: True)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 31])
def test_ranks_are_those_of_a_stable_sort(n: int) -> None:
    values = draw(4, n)
    values[1] = values[1].round()  # ties
    values[2] = float("-inf")
    assert torch.equal(portable.rank_descending(values), matching.rank_descending(values))


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (9, 9), (9, 4), (30, 1)])
def test_sums_over_slots(tokens: int, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    slots = torch.stack([torch.arange(tokens) % count for _ in range(3)])
    slots = torch.stack([row[torch.randperm(tokens, generator=generator)] for row in slots])
    x = draw(3, tokens, 5)
    sums = portable.sum_slots(x, portable.split_slots(slots, count))
    torch.testing.assert_close(sums, Assignment(slots, count).sum(x))


@pytest.mark.parametrize(("n", "r", "rounds"), [(12, 5, 1), (40, 16, 4), (40, 3, 4), (63, 31, 2)])
@pytest.mark.parametrize("protected", [0, 1, 5])
@pytest.mark.parametrize("whole", [False, True])
def test_clusters_are_the_same(n: int, r: int, rounds: int, protected: int, whole: bool) -> None:
    x, weights = draw(4, protected + n, 8), draw(4, protected + n, seed=1).abs() + 0.1
    weights = weights.mul(3).ceil() if whole else weights
    options = {"protected": protected, "rounds": rounds, "candidates": 1.5}
    plain = clustering.cluster(x, weights, r, **options)
    exported = clustering.cluster_exported(x, weights, r, **options)
    assert torch.equal(exported.slots, plain.slots)
    assert exported.split is not None
    torch.testing.assert_close(portable.sum_slots(x, exported.split), plain.sum(x))


def test_equal_tokens_are_clustered_too() -> None:
    x, weights = torch.ones(2, 41, 8), torch.ones(2, 41)
    exported = clustering.cluster_exported(x, weights, 20, protected=1, rounds=2, candidates=1.5)
    for slots in exported.slots:
        assert slots.unique().tolist() == list(range(21))
    assert exported.total(weights).sum(dim=1).tolist() == [41, 41]


@pytest.mark.parametrize("method", EXPORTED)
def test_methods_on_a_vision_transformer(method: str, exporting: Any) -> None:
    check("plain", method, exporting)


@pytest.mark.parametrize("method", ["ward", "mctf"])
@pytest.mark.parametrize("name", [name for name in NAMES if name in ONE_PER_OPS or name in ("hf_vit", "hf_siglip")])
def test_models(name: str, method: str, exporting: Any) -> None:
    check(name, method, exporting)


@pytest.mark.parametrize("method", ["ward", "mctf"])
def test_dense_models(method: str, exporting: Any) -> None:
    check("mean_pool_prefix", method, exporting, dense=True)


def check(name: str, method: str, exporting: Any, **options: Any) -> None:
    """A fused model gives the same in float64, with the plain operations and with those of exported graphs."""
    model = mctf.fuse(make(name), method, r=3, blocks=range(1, DEPTH - 1), **options).double()
    images = make_images(model, 3)
    with torch.no_grad():
        expected = run(model, images)
        exporting()
        torch.testing.assert_close(run(model, images), expected, rtol=1e-9, atol=1e-9)
