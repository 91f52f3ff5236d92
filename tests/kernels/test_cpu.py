"""Clustering and pooling compiled for a CPU against their plain versions."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

import mctf
from helpers.models import make, make_images, run
from mctf import kernels
from mctf.core import clustering
from mctf.core.assignment import Assignment

cpu = pytest.importorskip("mctf.kernels.cpu", reason="needs numba", exc_type=ImportError)


def tokens(seed: int, *, count: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, count, 24, generator=generator, dtype=torch.float64)
    x += 2 * torch.randn(batch, 1, 24, generator=generator, dtype=torch.float64)
    weights = torch.rand(batch, count, generator=generator, dtype=torch.float64) + 0.05
    return x.to(dtype), weights.to(dtype)


def both(x: Tensor, weights: Tensor, r: int, protected: int, rounds: int) -> tuple[Assignment, Assignment]:
    options = {"protected": protected, "rounds": rounds, "candidates": 1.5}
    return cpu.cluster(x, weights, r, **options), clustering.cluster(x, weights, r, **options)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("count", "protected", "r", "rounds"),
    [(37, 1, 8, 4), (20, 0, 9, 4), (51, 2, 3, 4), (71, 1, 30, 2), (18, 1, 8, 8), (197, 1, 36, 4), (30, 1, 27, 27)],
)
def test_clusters_are_those_of_the_plain_version(count: int, protected: int, r: int, rounds: int, seed: int) -> None:
    x, weights = tokens(seed, count=count)
    before = weights.clone()
    compiled, plain = both(x, weights, r, protected, rounds)
    assert torch.equal(compiled.slots, plain.slots)
    assert torch.equal(weights, before)
    for actual, expected in zip(compiled.members(), plain.members(), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


def test_threads_share_the_images() -> None:
    x, weights = tokens(0, count=150, batch=26)
    assert x.shape[0] * 149**2 >= 1.1 * cpu._PER_THREAD
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        compiled, plain = both(x, weights, 40, 1, 4)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(compiled.slots, plain.slots)


def test_float32_loses_no_more_than_the_plain_version() -> None:
    x, weights = tokens(0, count=197, batch=4, dtype=torch.float32)
    errors = []
    for assignment in both(x, weights, 60, 1, 4):
        unit = x / x.norm(dim=2, keepdim=True)
        means = assignment.unpool(assignment.pool(unit, weights))
        errors.append((weights * (unit - means).square().sum(2)).sum())
    torch.testing.assert_close(errors[0], errors[1], rtol=0.01, atol=0.0)  # near-ties


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1.0])
def test_undefined_and_equal_tokens_fill_every_slot(value: float) -> None:
    x, received = torch.full((2, 20, 8), value), torch.full((2, 1, 20), value)
    assignment, _, _ = kernels.cluster(x, received, None, r=6, protected=1, rounds=2, candidates=1.5)
    assert [sorted(set(slots.tolist())) for slots in assignment.slots] == [list(range(14))] * 2


@pytest.mark.parametrize("keep_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pooling(dtype: torch.dtype, keep_norm: bool) -> None:
    x, weights = tokens(1, count=60, batch=5, dtype=dtype)
    assignment = cpu.cluster(x, weights, 25, protected=1, rounds=2, candidates=1.5)
    weights[0] = 0  # dropped tokens: their slots are 0
    weights[1, :30] = 0
    with kernels.disable_kernels(), torch.no_grad():
        expected, *others = kernels.merge(x, assignment, weights=weights, also=2 * x, keep_norm=keep_norm)
    mean, *rest = kernels.merge(x, assignment, weights=weights, also=2 * x, keep_norm=keep_norm)
    torch.testing.assert_close([mean, *rest], [expected, *others])
    assert mean[0].count_nonzero() == 0
    assert torch.equal(cpu.pool(x, weights, assignment, keep_norm=keep_norm), mean)
    alone = assignment.slots[2].bincount()[assignment.slots[2]] == 1
    assert torch.equal(assignment.unpool(mean)[2, alone], x[2, alone]), "a token alone stays as it is"


@pytest.mark.parametrize("keep_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pooling_keeps_what_is_no_number(dtype: torch.dtype, keep_norm: bool) -> None:
    x, weights = tokens(1, count=60, batch=3, dtype=dtype)
    assignment = cpu.cluster(x, weights, 25, protected=1, rounds=2, candidates=1.5)
    x[0, 7, 3], weights[1, 9] = float("nan"), float("nan")
    mean = cpu.pool(x, weights, assignment, keep_norm=keep_norm)
    assert mean[0, assignment.slots[0, 7], 3].isnan()
    assert mean[1, assignment.slots[1, 9]].isnan().all()
    assert mean[2].isfinite().all()


def test_a_fused_model_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("plain").double()
    images = make_images(model, 2).double()
    mctf.fuse(model, "ward", r=0.3)
    with kernels.disable_kernels():
        expected = run(model, images)
    torch.testing.assert_close(run(model, images), expected)

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(cpu, "cluster", refuse)
    with pytest.raises(AssertionError, match="called"):
        run(model, images)
    with kernels.disable_kernels():
        run(model, images)


def test_importing_the_library_leaves_numba_alone() -> None:
    code = "import mctf.kernels, sys; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
