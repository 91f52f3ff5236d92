"""A batch without images: a fused model gives what the unfused one gives, in shape and dtype."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mctf
from helpers.models import NAMES, ONE_PER_OPS, make, make_images, run
from mctf.core.assignment import Assignment

METHODS = tuple(mctf.methods())
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("mctf", {"attention": attention}) for attention in ("precise", "previous", "exact")),
    *(("mctf", {"pooling": pooling}) for pooling in ("size", "mean", "max")),
    ("mctf", {"informativeness": "class", "bidirectional": False}),
    ("evit", {"fuse_inattentive": False}),
)


def fused(model: Any, method: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mctf.fuse(model, method, **options)


def no_images(model: nn.Module) -> Tensor:
    return make_images(model, 1)[:0]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)


def plain_result(name: str) -> Tensor:
    """What the unfused model gives; where it fails, the test is skipped: a fused model may fail then too."""
    model = make(name)
    with torch.no_grad():
        try:
            return run(model, no_images(model))
        except RuntimeError as failure:
            pytest.skip(f"the unfused model takes no empty batch: {failure}")


def check_all_ways(name: str, method: str, **options: Any) -> None:
    """Evaluation, dense, traced, and training with a backward pass."""
    expected = plain_result(name)
    try:
        model = fused(make(name), method, **options)
    except mctf.MctfError:
        return  # a method that needs a class token
    x = no_images(model)
    with torch.no_grad():
        assert_same(run(model, x), expected)
        with mctf.trace(model) as trace:
            run(model, x)
        assert trace.source_map().shape[0] == trace.dropped().shape[0] == 0
        assert trace.unpool(torch.zeros(0, trace.token_counts[-1], 5)).shape == (0, *trace.source_map().shape[1:], 5)
        mctf.unfuse(model)
        assert_same(run(fused(model, method, dense=True, **options), x), expected)
    model.train()
    result = run(model, x)
    assert_same(result, expected)
    result.sum().backward()
    model.eval()
    with torch.no_grad():
        assert run(model, make_images(model, 1)).isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str) -> None:
    check_all_ways("plain", method)


@pytest.mark.parametrize(("method", "options"), OPTIONS, ids=str)
def test_every_variant(method: str, options: dict[str, Any]) -> None:
    check_all_ways("registers", method, **options)


@pytest.mark.parametrize("name", NAMES)
def test_every_model(name: str) -> None:
    check_all_ways(name, "mctf")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("name", ONE_PER_OPS)
def test_every_method_on_every_model(name: str, method: str) -> None:
    check_all_ways(name, method)


@pytest.mark.parametrize("method", ["mctf", "tome"])
@torch.no_grad()
def test_feature_maps(method: str) -> None:
    model = make("plain")
    images = no_images(model)
    expected = model.forward_intermediates(images, output_fmt="NLC")
    actual = fused(model, method, r=8).forward_intermediates(images, output_fmt="NLC")
    for one, other in zip([actual[0], *actual[1]], [expected[0], *expected[1]], strict=True):
        assert_same(one, other)


COMPILED = [
    pytest.param("random", False),
    pytest.param("mctf", True, marks=pytest.mark.slow),
    pytest.param("tome", True, marks=[pytest.mark.slow, pytest.mark.nightly]),
    *(
        pytest.param(method, False, marks=[pytest.mark.slow, pytest.mark.nightly])
        for method in METHODS
        if method != "random"
    ),
]


@pytest.mark.parametrize(("method", "dynamic"), COMPILED)
@torch.no_grad()
def test_compiled(method: str, dynamic: bool) -> None:
    torch.compiler.reset()
    model = fused(make("plain", depth=2), method, r=[0, 6])
    adaptive = model.blocks.method.adaptive
    compiled = torch.compile(model, fullgraph=not adaptive, dynamic=dynamic, backend="eager")
    batches = (3, 0, 2) if dynamic else (3, 0)
    for images in (make_images(model, 3)[:count] for count in batches):
        actual, expected = compiled(images), model(images)
        assert_same(actual, expected)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_an_assignment_without_images() -> None:
    slots = torch.zeros(0, 5, dtype=torch.long)
    assignment = Assignment(slots, 3)
    x, weights = torch.zeros(0, 5, 4), torch.zeros(0, 5)
    assert assignment.pool(x, weights).shape == assignment.sum(x).shape == assignment.max_pool(x).shape == (0, 3, 4)
    assert assignment.unpool(torch.zeros(0, 3, 4, 2)).shape == (0, 5, 4, 2)
    assert assignment.first_of_slot(x).shape == (0, 3, 4)
    assert [each.shape for each in assignment.members()] == [(0, 5), (0, 4)]
