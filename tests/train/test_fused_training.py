"""Fused models learn: gradients, gradient checkpointing, drop-path, dropout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mctf
from helpers.models import METHODS, PAIRS, family_of, make, make_images, run

every_pair = pytest.mark.parametrize(("name", "method"), PAIRS)
every_method = pytest.mark.parametrize("method", METHODS)


def loss_of(model: nn.Module, images: Tensor) -> Tensor:
    labels = torch.arange(len(images))
    return F.cross_entropy(run(model, images), labels)


def gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss_of(model, images).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@every_pair
def test_every_parameter_learns(name: str, method: str) -> None:
    model = make(name).train()
    images = make_images(model, 2)
    mctf.fuse(model, method, r=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = loss_of(model, images)
    found = gradients(model, images)
    assert [name for name, grad in found.items() if grad is None or not grad.isfinite().all()] == []
    assert [name for name, grad in found.items() if not grad.any()] == []
    for _ in range(5):
        gradients(model, images)
        optimizer.step()
    assert loss_of(model, images) < before / 2


# Attention weights of the pooling carry no gradient, so the derivative is exact only for the other poolings.
EXACT: list[tuple[str, dict[str, Any]]] = [
    ("mctf", {"pooling": "size"}),
    ("mctf", {"pooling": "mean", "bidirectional": False}),
    ("mctf", {"pooling": "max"}),
    ("mctf", {"pooling": "size", "attention": "precise"}),
    ("mctf", {"pooling": "size", "attention": "previous"}),
    ("tome", {}),
]


@pytest.mark.parametrize(("method", "options"), EXACT, ids=str)
@pytest.mark.parametrize("name", ["layer_scale", "mean_pool", "post_norm"])
def test_the_gradient_is_the_slope(name: str, method: str, options: dict[str, Any]) -> None:
    model = make(name).double()
    images = make_images(model, 2)
    mctf.fuse(model, method, r=8, **options)
    found = gradients(model, images)
    generator = torch.Generator().manual_seed(3)
    steps = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}
    expected = sum((found[name] * step).sum() for name, step in steps.items())

    width = 1e-7  # small enough that no pair changes

    @torch.no_grad()
    def moved(by: float) -> Tensor:
        for name, parameter in model.named_parameters():
            parameter += by * steps[name]
        return loss_of(model, images)

    slope = (moved(width) - moved(-2 * width)) / (2 * width)
    torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-6)


@every_pair
def test_gradient_checkpointing_changes_nothing(name: str, method: str) -> None:
    model = make(name).double().train()
    images = make_images(model, 2)
    mctf.fuse(model, method, r=8)
    logits, kept = run(model, images), gradients(model, images)
    family_of(model).checkpoint(model, True)
    torch.testing.assert_close(run(model, images), logits, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(gradients(model, images), kept, atol=1e-10, rtol=1e-8)


def test_checkpointing_recomputes_under_dropout_with_the_same_random_numbers() -> None:
    model = make("plain", drop_path_rate=0.5, proj_drop_rate=0.2).double().train()
    images = make_images(model, 4)
    mctf.fuse(model, r=8)
    model.set_grad_checkpointing(True)
    found = gradients(model, images)
    assert all(grad.isfinite().all() for grad in found.values())


@every_method
def test_a_trace_is_not_disturbed_by_recomputation(method: str) -> None:
    model = make("plain").train()
    images = make_images(model, 2)
    mctf.fuse(model, method, r=8)
    model.set_grad_checkpointing(True)
    with mctf.trace(model) as trace:
        loss = loss_of(model, images)
        seen = trace.source_map()
        loss.backward()
        assert len(trace.blocks) == 4
        assert torch.equal(trace.source_map(), seen)


@every_method
@pytest.mark.parametrize("name", ["plain", "post_norm", "map_pool", "eva02", "beit", "cait", "relpos", "naflex"])
def test_drop_path_and_dropout_work_in_training_only(name: str, method: str) -> None:
    model = make(name, drop_path_rate=0.5, attn_drop_rate=0.3, proj_drop_rate=0.3)
    images = make_images(model, 4)
    mctf.fuse(model, method, r=8)
    still = model(images)
    assert torch.equal(model(images), still)
    model.train()
    assert all(grad.isfinite().all() for grad in gradients(model, images).values())
    assert not torch.allclose(model(images), model(images))
    assert torch.equal(model.eval()(images), still)


def test_every_kind_of_dropout_is_applied() -> None:
    for rate in ("drop_path_rate", "attn_drop_rate", "proj_drop_rate", "pos_drop_rate", "patch_drop_rate"):
        model = make("plain", **{rate: 0.4})
        images = make_images(model, 4)
        mctf.fuse(model, r=[8] * 4)  # every block fuses, so every block goes the library's way
        still = model(images)
        assert not torch.allclose(model.train()(images), still), rate
