"""A compiled fused model compiles once for all batch sizes, and once for each r it is set to."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import mctf
from helpers.models import make, make_images


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module) -> tuple[nn.Module, CompileCounter]:
    counter = CompileCounter()
    return torch.compile(model, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize("method", ["mctf"])
@torch.inference_mode()
def test_other_batches_compile_once_more_and_then_never(method: str) -> None:
    model = mctf.fuse(make("plain"), method, r=8)
    run, counter = compiled(model)
    for batch in (2, 3, 5, 4, 7):
        run(make_images(model, batch))
    assert counter.frame_count <= 2  # once for the first batch, once for all others


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mctf"])
@torch.inference_mode()
def test_going_back_and_forth_between_a_few_r_compiles_each_once(method: str) -> None:
    model = mctf.fuse(make("plain"), method, r=8)
    run, counter = compiled(model)
    images = make_images(model, 2)
    for r in (8, 4, 0, 8, 4, 0, 8):
        mctf.set_r(model, r)
        run(images)
    assert counter.frame_count == 3
