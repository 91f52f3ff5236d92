"""Pooling by Triton against `Assignment`, values and gradients."""

import pytest
import torch

from helpers.kernels import distance, poisoned
from mctf import kernels
from mctf.core.assignment import Assignment, joint_weights
from mctf.errors import MctfError
from mctf.kernels import pooling as pooling_ops


@pytest.fixture(params=[0, 800], ids=["as of many slots", "as of few slots"])
def few_slots(request, monkeypatch):
    monkeypatch.setattr(pooling_ops, "_FEW_SLOTS", request.param)


@pytest.fixture
def fusion(device, few_slots):
    generator = torch.Generator().manual_seed(3)
    slots = torch.stack([(torch.randperm(50, generator=generator) % 31) for _ in range(2)])
    slots[0, slots[0] == 4] = 5  # one slot with many tokens …
    slots[0, 0] = 4  # … and none without
    x = torch.randn(2, 50, 24, generator=generator)
    y = torch.randn(2, 50, 40, generator=generator)
    weights = torch.rand(2, 50, generator=generator) + 0.1
    sizes = torch.randint(1, 5, (2, 50), generator=generator).float()
    return (Assignment(slots.to(device), 31), *(tensor.to(device) for tensor in (x, y, weights, sizes)))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.float16, 4e-4), (torch.bfloat16, 3e-3)])
def test_both_tensors_and_sizes(fusion, dtype, near, monkeypatch):
    monkeypatch.setattr(pooling_ops, "_outputs", poisoned(pooling_ops._outputs))
    assignment, x, y, weights, sizes = fusion
    x, y = x.to(dtype), y.to(dtype)
    x_mean, y_mean, totals = kernels.fuse_both(x, y, weights, sizes, assignment, by_size=True)
    joint = (weights * sizes).double()
    assert distance(x_mean, assignment.pool(x.double(), joint)) < near
    assert distance(y_mean, assignment.pool(y.double(), joint)) < near
    assert torch.equal(totals, assignment.total(sizes))


@pytest.mark.parametrize("by_size", [True, False])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_weights_and_sizes_as_the_plain_version_takes_them(fusion, weighted, sized, by_size):
    assignment, x, _, weights, sizes = fusion
    given = (weights if weighted else None, sizes if sized else None, assignment)
    x_mean, totals = kernels.fuse_tokens(x, *given, by_size=by_size)
    with kernels.plain_operations():
        expected, expected_totals = kernels.fuse_tokens(x, *given, by_size=by_size)
    assert distance(x_mean, expected) < 1e-6
    assert torch.equal(totals, expected_totals)


@pytest.mark.parametrize("channels", [300, 1024])
def test_more_members_and_channels_than_a_program_takes_at_once(device, few_slots, channels):
    slots = torch.tensor([[0] * 70 + [1] + [2] * 9]).to(device)
    x, weights = torch.randn(1, 80, channels, device=device), torch.rand(1, 80, device=device) + 0.1
    assignment = Assignment(slots, 3)
    pooled = kernels.pool(x, weights, assignment)
    assert distance(pooled, assignment.pool(x.double(), weights.double())) < 1e-6
    assert torch.equal(pooled[0, 1], x[0, 70])


def test_a_token_alone_in_its_slot_is_not_changed(fusion):
    assignment, x, _, weights, _ = fusion
    pooled = kernels.pool(x, weights, assignment)
    assert torch.equal(pooled[0, 4], x[0, 0])


def test_a_first_token_that_counts_for_nothing(fusion):
    assignment, x, _, weights, _ = fusion
    order, start = assignment.members()
    many = (start.diff(dim=1) > 1).nonzero()[0]  # an image and a slot of it with several tokens
    weights[many[0], order[many[0], start[many[0], many[1]]]] = 0
    pooled = kernels.pool(x, weights, assignment)
    assert distance(pooled, assignment.pool(x.double(), weights.double())) < 1e-6


def test_slots_without_members_are_0(device, few_slots):
    assignment = Assignment(torch.tensor([[0, 0, 1, 1]], device=device), 3)
    x, weights = torch.ones(1, 4, 5, device=device), torch.ones(1, 4, device=device)
    assert torch.equal(kernels.pool(x, weights, assignment), assignment.pool(x, weights))


@pytest.mark.parametrize("by_size", [True, False])
@pytest.mark.parametrize("given", ["weights and sizes", "weights", "sizes"])
def test_gradients(fusion, given, by_size):
    assignment, x, y, weights, sizes = fusion
    weights, sizes = (weights if "weights" in given else None, sizes if "sizes" in given else None)
    found = [tensor.clone().requires_grad_() for tensor in (x, y)]
    expected = [tensor.clone().requires_grad_() for tensor in (x, y)]
    x_mean, y_mean, _ = kernels.fuse_both(*found, weights, sizes, assignment, by_size=by_size)
    ones = torch.ones(2, 50, device=x.device)
    joint = joint_weights(weights, ones if sizes is None else sizes, by_size)
    (x_mean.sin().sum() + y_mean.cos().sum()).backward()
    (assignment.pool(expected[0], joint).sin().sum() + assignment.pool(expected[1], joint).cos().sum()).backward()
    for ours, theirs in zip(found, expected, strict=True):
        assert distance(ours.grad, theirs.grad) < 1e-5


def test_a_slot_of_tokens_that_count_for_nothing_passes_no_gradient(device, few_slots):
    assignment = Assignment(torch.tensor([[0, 0, 1, 1]], device=device), 2)
    x = torch.randn(1, 4, 5, device=device, requires_grad=True)
    kernels.pool(x, torch.tensor([[0.0, 0.0, 1.0, 3.0]], device=device), assignment).sum().backward()
    expected = torch.tensor([0.0, 0.0, 0.25, 0.75], device=device)
    torch.testing.assert_close(x.grad, expected[None, :, None].expand(1, 4, 5))


def test_gradients_must_be_announced(fusion):
    assignment, x, *_ = fusion
    with pytest.raises(MctfError, match="train=True"):
        pooling_ops.pool(x.requires_grad_(), None, None, None, False, assignment.slots, *assignment.members(), False)
