"""One fusion as one vector, against loops; gradients by finite differences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mctf.core.assignment import Assignment

many = settings(max_examples=60)


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    """Any fusion in which every slot is used."""
    tokens = draw(st.integers(1, 14))
    count = draw(st.integers(1, tokens))
    images = [
        draw(st.permutations([*range(count), *(draw(st.integers(0, count - 1)) for _ in range(tokens - count))]))
        for _ in range(draw(st.integers(1, 3)))
    ]
    return Assignment(torch.tensor(images), count)


def draw_tokens(assignment: Assignment, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(int(assignment.slots.sum()))
    return torch.randn(*assignment.slots.shape, channels, generator=generator, dtype=torch.float64)


def members(assignment: Assignment, image: int, slot: int) -> list[int]:
    return [token for token, place in enumerate(assignment.slots[image].tolist()) if place == slot]


@many
@given(assignment=assignments())
def test_every_operation_is_what_loops_give(assignment: Assignment) -> None:
    x = draw_tokens(assignment)
    weights = draw_tokens(assignment)[..., 0].abs() + 0.1
    total, summed = assignment.total(weights), assignment.sum(x)
    pooled, largest, picked = assignment.pool(x, weights), assignment.max_pool(x), assignment.first_of_slot(x)
    for image in range(len(x)):
        for slot in range(assignment.count):
            group = members(assignment, image, slot)
            w, tokens = weights[image, group], x[image, group]
            torch.testing.assert_close(total[image, slot], w.sum())
            torch.testing.assert_close(summed[image, slot], tokens.sum(dim=0))
            torch.testing.assert_close(pooled[image, slot], (w[:, None] * tokens).sum(dim=0) / w.sum())
            assert torch.equal(largest[image, slot], tokens.amax(dim=0))
            assert torch.equal(picked[image, slot], tokens[0])


@many
@given(assignment=assignments())
def test_spreading_gives_each_token_its_slot(assignment: Assignment) -> None:
    fused = draw_tokens(Assignment(assignment.slots[:, : assignment.count], assignment.count))
    spread = assignment.unpool(fused)
    for image, row in enumerate(assignment.slots.tolist()):
        for token, slot in enumerate(row):
            assert torch.equal(spread[image, token], fused[image, slot])
    assert torch.equal(assignment.unpool(fused[..., 0]), spread[..., 0])
    assert torch.equal(assignment.unpool(fused[..., None]), spread[..., None])
    assert torch.equal(assignment.first_of_slot(spread), fused)
    torch.testing.assert_close(assignment.pool(spread, torch.ones_like(spread[..., 0])), fused)


@many
@given(first=assignments(), data=st.data())
def test_two_fusions_are_one(first: Assignment, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, first.count))
    slots = [data.draw(st.permutations([i % count for i in range(first.count)])) for _ in first.slots]
    later = Assignment(torch.tensor(slots), count)
    both = first.compose(later)
    x = draw_tokens(first)
    torch.testing.assert_close(both.sum(x), later.sum(first.sum(x)))
    fused = later.sum(first.sum(x))
    assert torch.equal(both.unpool(fused), first.unpool(later.unpool(fused)))
    assert both.count == count


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_pooling_keeps_the_dtype_and_sums_in_float32(dtype: torch.dtype) -> None:
    assignment = Assignment(torch.zeros(1, 4000, dtype=torch.int64), 1)
    pooled = assignment.pool(torch.ones(1, 4000, 2, dtype=dtype), torch.ones(1, 4000))
    assert pooled.dtype == dtype
    torch.testing.assert_close(pooled, torch.ones(1, 1, 2, dtype=dtype), atol=1e-3, rtol=0)


OPERATIONS = {
    "sum": lambda assignment, x: assignment.sum(x),
    "pool": lambda assignment, x: assignment.pool(x, torch.linspace(0.1, 2, 8, dtype=x.dtype).view(2, 4)),
    "largest": lambda assignment, x: assignment.max_pool(x),
    "pick": lambda assignment, x: assignment.first_of_slot(x),
    "spread": lambda assignment, x: assignment.unpool(x[:, : assignment.count]),
    "spread then pick": lambda assignment, x: assignment.first_of_slot(assignment.unpool(x[:, : assignment.count])),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients(operation: str) -> None:
    assignment = Assignment(torch.tensor([[1, 0, 1, 2], [2, 2, 1, 0]]), 3)
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: OPERATIONS[operation](assignment, x), x)


@many
@given(assignment=assignments())
def test_both_ways_of_pooling_agree(assignment: Assignment) -> None:
    """Gradients take the way by scattering; without them, a CPU pools by bags."""
    x = draw_tokens(assignment).float()
    weights = x[..., 0].abs() + 0.1
    by_bags, by_scattering = assignment.pool(x, weights), assignment.pool(x.clone().requires_grad_(), weights)
    assert by_scattering.requires_grad
    torch.testing.assert_close(by_bags, by_scattering.detach())


def test_bags_leave_single_tokens_as_they_are_and_padding_empty() -> None:
    assignment = Assignment(torch.tensor([[2, 0, 2], [1, 0, 1]]), 4)
    x, weights = torch.randn(2, 3, 5), torch.rand(2, 3) + 0.1
    pooled = assignment.pool(x, weights)
    assert torch.equal(pooled[:, 0], x[:, 1])
    assert not pooled[:, 3].any()
    assert not pooled[0, 1].any()


def test_pooling_needs_no_numbers_to_know_its_shape() -> None:
    with FakeTensorMode():
        assignment = Assignment(torch.zeros(2, 9, dtype=torch.int64), 4)
        assert assignment.pool(torch.randn(2, 9, 5), torch.rand(2, 9)).shape == (2, 4, 5)


@pytest.mark.parametrize("gradient", [False, True])
def test_a_slot_of_weight_0_is_0(gradient: bool) -> None:
    assignment = Assignment(torch.tensor([[0, 1, 1, 2]]), 3)
    x = torch.randn(1, 4, 5, requires_grad=gradient)
    pooled = assignment.pool(x, torch.tensor([[1.0, 0.0, 0.0, 2.0]]))
    assert torch.equal(pooled[:, 1], torch.zeros(1, 5))
    torch.testing.assert_close(pooled[:, [0, 2]], x[:, [0, 3]])
    if gradient:
        pooled.sum().backward()
        assert torch.equal(x.grad[0, :, 0], torch.tensor([1.0, 0.0, 0.0, 1.0]))
