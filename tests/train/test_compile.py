"""Training compiled block by block: all r' share a few graphs, and the results equal those of eager mode."""

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
def _reset_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def logits_and_gradient(model: nn.Module, images: Tensor, lighter: int) -> list[Tensor]:
    model.zero_grad()
    heavy, light = run_branches(model, images, lighter)
    (heavy.logits + light.features.sum(dim=1, keepdim=True)).square().sum().backward()
    return [heavy.logits.detach(), light.logits.detach(), model.blocks[0].norm1.weight.grad.clone()]


@pytest.mark.parametrize(
    ("method", "order"),
    [
        ("tome", (5, 8, 3, 2, 6)),  # 0 and 1 have graphs of their own
        pytest.param("tome", (5, 8, 0, 3, 1, 2, 7, 4, 6), marks=[pytest.mark.slow, pytest.mark.nightly]),
        pytest.param("mctf", (5, 8, 0, 3, 1, 2, 7, 4, 6), marks=pytest.mark.slow),
    ],
)
def test_all_r_share_a_few_graphs_with_the_results_of_eager_mode(method: str, order: tuple[int, ...]) -> None:
    model = mctf.fuse(make("plain").double().train(), method, r=8)
    images = make_images(model, 2)
    expected = [logits_and_gradient(model, images, lighter) for lighter in order]
    counter = CompileCounter()
    compile_blocks(model, backend=counter)
    counts = []
    for lighter, eager in zip(order, expected, strict=True):
        torch.testing.assert_close(logits_and_gradient(model, images, lighter), eager, rtol=1e-7, atol=1e-9)
        counts.append(counter.frame_count)
    assert 1 < counts[-1] <= 8  # with and without fusion, with and without fused tokens before, r of 0, 1 or more
    assert len(set(counts[4 if 0 in order else 2 :])) == 1  # later r compile nothing


@pytest.mark.parametrize("depth", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_blocks_with_different_drop_path_rates_compile(depth: int) -> None:
    """Each rate has a graph of its own; ten are more than dynamo's default limit of eight."""
    model = make("plain", depth=depth, drop_path_rate=0.3)
    images = make_images(model, 2)
    expected = model(images)
    counter = CompileCounter()
    compile_blocks(model, backend=counter)
    model.train()(images)
    assert counter.frame_count == depth
    torch.testing.assert_close(model.eval()(images), expected, rtol=1e-5, atol=1e-5)


def test_a_compiled_model_can_be_evaluated() -> None:
    model = make("plain")
    compile_blocks(model, backend="eager")
    batch = Batch(make_images(model, 2), torch.arange(2))
    evaluation = evaluate(model, [batch], [Setting("mctf", 8)])
    expected = evaluate(make("plain"), [batch], [Setting("mctf", 8)])
    assert [row.kl for row in evaluation.rows] == pytest.approx([row.kl for row in expected.rows], rel=1e-4, abs=1e-7)


def test_a_compiled_method_keeps_its_attributes_and_unfuses() -> None:
    model = mctf.fuse(make("plain"), r=8)
    compile_blocks(model, backend="eager")
    method = fused_stack(model).method
    assert isinstance(method, CompiledMethod)
    assert (method.name, method.min_tokens) == ("mctf", 10)
    assert "compiled MCTF(" in repr(fused_stack(model))
    mctf.unfuse(model)
    assert torch.equal(model(make_images(model, 1)), make("plain")(make_images(model, 1)))
