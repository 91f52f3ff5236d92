"""Merging by Triton against `Assignment`, values and gradients."""

import pytest
import torch

from helpers.kernels import distance, poisoned
from mctf import kernels
from mctf.core.assignment import Assignment, joint_weights
from mctf.errors import MctfError
from mctf.kernels import pooling as pooling_ops


@pytest.fixture(params=[0, 800], ids=["tile of many slots", "tile of few slots"])
def few_slots(request, monkeypatch):
    monkeypatch.setattr(pooling_ops, "FEW_SLOTS", request.param)


@pytest.fixture
def fusion(device, few_slots):
    generator = torch.Generator().manual_seed(3)
    slots = torch.stack([(torch.randperm(24, generator=generator) % 15) for _ in range(2)])
    slots[0, slots[0] == 4] = 5  # one slot with many tokens …
    slots[0, 0] = 4  # … and none without
    x = torch.randn(2, 24, 24, generator=generator)
    y = torch.randn(2, 24, 40, generator=generator)
    weights = torch.rand(2, 24, generator=generator) + 0.1
    sizes = torch.randint(1, 5, (2, 24), generator=generator).float()
    return (Assignment(slots.to(device), 15), *(tensor.to(device) for tensor in (x, y, weights, sizes)))


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setattr(pooling_ops, "_allocate_outputs", poisoned(pooling_ops._allocate_outputs))


def pooled(x, weights, assignment):
    return kernels.merge(x, assignment, weights=weights)[0]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.float16, 4e-4), (torch.bfloat16, 3e-3)])
def test_two_tensors_and_sizes(fusion, dtype, near):
    assignment, x, y, weights, sizes = fusion
    x, y = x.to(dtype), y.to(dtype)
    x_mean, y_mean, totals = kernels.merge(x, assignment, weights=weights, sizes=sizes, by_size=True, also=y)
    joint = (weights * sizes).double()
    assert distance(x_mean, assignment.pool(x.double(), joint)) < near
    assert distance(y_mean, assignment.pool(y.double(), joint)) < near
    assert torch.equal(totals, assignment.total(sizes))


@pytest.mark.parametrize("by_size", [True, False])
@pytest.mark.parametrize("has_sizes", [True, False])
@pytest.mark.parametrize("has_weights", [True, False])
def test_weights_and_sizes_as_in_the_plain_version(fusion, has_weights, has_sizes, by_size):
    assignment, x, _, weights, sizes = fusion
    options = {"weights": weights if has_weights else None, "sizes": sizes if has_sizes else None, "by_size": by_size}
    x_mean, totals = kernels.merge(x, assignment, **options)
    with kernels.disable_kernels():
        expected, expected_totals = kernels.merge(x, assignment, **options)
    assert distance(x_mean, expected) < 1e-6
    assert torch.equal(totals, expected_totals)


@pytest.mark.parametrize("channels", [300, 1024])
def test_more_members_and_channels_than_a_program_takes_at_once(device, few_slots, channels):
    slots = torch.tensor([[0] * 70 + [1] + [2] * 9]).to(device)
    x, weights = torch.randn(1, 80, channels, device=device), torch.rand(1, 80, device=device) + 0.1
    assignment = Assignment(slots, 3)
    mean = pooled(x, weights, assignment)
    assert distance(mean, assignment.pool(x.double(), weights.double())) < 1e-6
    assert torch.equal(mean[0, 1], x[0, 70])


def test_a_token_alone_in_its_slot_is_bit_identical(fusion):
    assignment, x, _, weights, _ = fusion
    assert torch.equal(pooled(x, weights, assignment)[0, 4], x[0, 0])


def test_a_first_member_of_weight_0(fusion):
    assignment, x, _, weights, _ = fusion
    order, start = assignment.members()
    image, slot = (start.diff(dim=1) > 1).nonzero()[0]  # a slot with several tokens
    weights[image, order[image, start[image, slot]]] = 0
    assert distance(pooled(x, weights, assignment), assignment.pool(x.double(), weights.double())) < 1e-6


def test_slots_without_members_are_0(device, few_slots):
    assignment = Assignment(torch.tensor([[0, 0, 1, 1]], device=device), 3)
    x, weights = torch.ones(1, 4, 5, device=device), torch.ones(1, 4, device=device)
    expected = torch.tensor([1.0, 1.0, 0.0], device=device)
    assert torch.equal(pooled(x, weights, assignment), expected[None, :, None].expand(1, 3, 5))


@pytest.mark.parametrize("by_size", [True, False], ids=["sizes of 0", "weights of 0"])
def test_a_slot_whose_weights_sum_to_0_is_0_and_passes_no_gradient(device, few_slots, by_size):
    assignment = Assignment(torch.tensor([[0, 0, 1, 1]], device=device), 2)
    x = torch.randn(1, 4, 5, device=device, requires_grad=True)
    numbers = torch.tensor([[0.0, 0.0, 1.0, 3.0]], device=device)
    options = {"sizes": numbers, "by_size": True} if by_size else {"weights": numbers}
    mean, totals = kernels.merge(x, assignment, **options)
    assert not mean[0, 0].any()
    assert totals.tolist() == ([[0, 4]] if by_size else [[2, 2]])
    mean.sum().backward()
    expected = torch.tensor([0.0, 0.0, 0.25, 0.75], device=device)
    torch.testing.assert_close(x.grad, expected[None, :, None].expand(1, 4, 5))


@pytest.mark.parametrize(
    ("given", "by_size"),
    [("weights and sizes", True), ("weights and sizes", False), ("weights", False), ("sizes", True)],
)
def test_gradients(fusion, given, by_size):
    assignment, x, y, weights, sizes = fusion
    weights, sizes = (weights if "weights" in given else None, sizes if "sizes" in given else None)
    actual = [tensor.clone().requires_grad_() for tensor in (x, y)]
    expected = [tensor.clone().requires_grad_() for tensor in (x, y)]
    x_mean, y_mean, _ = kernels.merge(
        actual[0], assignment, weights=weights, sizes=sizes, by_size=by_size, also=actual[1]
    )
    ones = torch.ones(2, 24, device=x.device)
    joint = joint_weights(weights, ones if sizes is None else sizes, by_size)
    (x_mean.sin().sum() + y_mean.cos().sum()).backward()
    (assignment.pool(expected[0], joint).sin().sum() + assignment.pool(expected[1], joint).cos().sum()).backward()
    for ours, theirs in zip(actual, expected, strict=True):
        assert distance(ours.grad, theirs.grad) < 1e-5


def test_gradients_need_train(fusion):
    assignment, x, *_ = fusion
    with pytest.raises(MctfError, match="train=True"):
        pooling_ops.pool(
            x.requires_grad_(), None, None, None, False, False, assignment.slots, *assignment.members(), False
        )
