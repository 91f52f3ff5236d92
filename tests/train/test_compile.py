"""Compiled block by block, a model does not compile again for every r'."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import mctf
from helpers.models import make, make_images
from mctf.api import fused_stack
from mctf.data import Batch
from mctf.evaluation.evaluate import Setting, evaluate
from mctf.train.compile import CompiledMethod, compile_blocks
from mctf.train.two_branch import run_branches


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def answers_and_gradient(model: nn.Module, images: Tensor, lighter: int) -> list[Tensor]:
    model.zero_grad()
    heavy, light = run_branches(model, images, lighter)
    (heavy.logits + light.features.sum(dim=1, keepdim=True)).square().sum().backward()
    return [heavy.logits.detach(), light.logits.detach(), model.blocks[0].norm1.weight.grad.clone()]


@pytest.mark.parametrize("method", ["mctf", "tome"])
def test_a_handful_of_graphs_serves_all_r_and_computes_the_same(method: str) -> None:
    model = mctf.fuse(make("plain").double().train(), method, r=8)
    images = make_images(model, 2)
    order = (5, 8, 0, 3, 1, 2, 7, 4, 6)
    expected = [answers_and_gradient(model, images, lighter) for lighter in order]
    counter = CompileCounter()
    compile_blocks(model, backend=counter)
    seen = []
    for lighter, wanted in zip(order, expected, strict=True):
        found = answers_and_gradient(model, images, lighter)
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
        seen.append(counter.frame_count)
    assert 1 < seen[-1] <= 8  # nothing fused yet or something, fused tokens before or not, and r of 0, 1 or more
    assert len(set(seen[5:])) == 1  # the later r compile nothing


def test_a_plain_model_compiles_its_blocks() -> None:
    model = make("plain").train()
    images = make_images(model, 2)
    expected = model(images)
    counter = CompileCounter()
    compile_blocks(model, backend=counter)
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
    assert 1 <= counter.frame_count <= len(model.blocks)


def test_a_compiled_plain_model_can_be_evaluated() -> None:
    model = make("plain")
    compile_blocks(model, backend="eager")
    batch = Batch(make_images(model, 2), torch.arange(2))
    found = evaluate(model, [batch], [Setting("mctf", 8)])
    expected = evaluate(make("plain"), [batch], [Setting("mctf", 8)])
    assert [row.kl for row in found.rows] == [row.kl for row in expected.rows]


def test_blocks_that_differ_in_drop_path_all_compile() -> None:
    """Each rate is a graph of its own, and more of them than the eight that one function has by default."""
    model = make("plain", depth=10, drop_path_rate=0.3).train()
    counter = CompileCounter()
    compile_blocks(model, backend=counter)
    model(make_images(model, 2))
    assert counter.frame_count == 10


def test_unfusing_and_names_go_on_working() -> None:
    model = mctf.fuse(make("plain"), r=8)
    compile_blocks(model, backend="eager")
    method = fused_stack(model).method
    assert isinstance(method, CompiledMethod)
    assert (method.name, method.min_tokens) == ("mctf", 10)
    assert "compiled MCTF(" in repr(fused_stack(model))
    mctf.unfuse(model)
    assert torch.equal(model(make_images(model, 1)), make("plain")(make_images(model, 1)))
