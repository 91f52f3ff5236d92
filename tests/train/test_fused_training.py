"""Training fused models: gradients, gradient checkpointing, drop path, dropout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mctf
from helpers.models import METHODS, ONE_PER_OPS, PAIRS, family_of, make, make_images, run

# one model per class of block operations; the other models are slow tests
every_pair = pytest.mark.parametrize(
    ("name", "method"),
    [pytest.param(*pair, marks=[] if pair[0] in ONE_PER_OPS else pytest.mark.slow) for pair in PAIRS],
)
every_method = pytest.mark.parametrize("method", METHODS)


def loss_of(model: nn.Module, images: Tensor) -> Tensor:
    labels = torch.arange(len(images))
    return F.cross_entropy(run(model, images), labels)


def gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss_of(model, images).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@every_pair
def test_every_parameter_has_a_gradient_and_the_loss_falls(name: str, method: str) -> None:
    model = make(name).train()
    images = make_images(model, 2)
    mctf.fuse(model, method, r=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = loss_of(model, images)
    first = gradients(model, images)
    assert [name for name, grad in first.items() if grad is None or not grad.isfinite().all()] == []
    assert [name for name, grad in first.items() if not grad.any()] == []
    for _ in range(5):
        gradients(model, images)
        optimizer.step()
    assert loss_of(model, images) < 0.7 * before


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
def test_the_gradient_equals_finite_differences(name: str, method: str, options: dict[str, Any]) -> None:
    model = make(name).double()
    images = make_images(model, 2)
    mctf.fuse(model, method, r=8, **options)
    analytic = gradients(model, images)
    generator = torch.Generator().manual_seed(3)
    steps = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}
    expected = sum((analytic[name] * step).sum() for name, step in steps.items())

    width = 1e-7  # too small to change a pair of fused tokens

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
    logits, expected = run(model, images), gradients(model, images)
    family_of(model).checkpoint(model, True)
    torch.testing.assert_close(run(model, images), logits, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(gradients(model, images), expected, atol=1e-10, rtol=1e-8)


def test_checkpointing_under_dropout() -> None:
    model = make("plain", drop_path_rate=0.5, proj_drop_rate=0.2).double().train()
    images = make_images(model, 4)
    mctf.fuse(model, r=8)
    model.set_grad_checkpointing(True)
    assert all(grad.isfinite().all() for grad in gradients(model, images).values())


@every_method
def test_recomputation_does_not_change_a_trace(method: str) -> None:
    model = make("plain").train()
    images = make_images(model, 2)
    mctf.fuse(model, method, r=8)
    model.set_grad_checkpointing(True)
    with mctf.trace(model) as trace:
        loss = loss_of(model, images)
        before = trace.source_map()
        loss.backward()
        assert len(trace.blocks) == 4
        assert torch.equal(trace.source_map(), before)


@pytest.mark.parametrize("method", ["mctf", *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS[1:])])
@pytest.mark.parametrize("name", ["plain", "post_norm", "map_pool", "eva02", "beit", "cait", "relpos", "naflex"])
def test_drop_path_and_dropout_act_in_training_only(name: str, method: str) -> None:
    model = make(name, drop_path_rate=0.5, attn_drop_rate=0.3, proj_drop_rate=0.3)
    images = make_images(model, 4)
    mctf.fuse(model, method, r=8)
    expected = model(images)
    assert torch.equal(model(images), expected)
    model.train()
    assert all(grad.isfinite().all() for grad in gradients(model, images).values())
    assert not torch.allclose(model(images), model(images))
    assert torch.equal(model.eval()(images), expected)


def test_every_kind_of_dropout_is_applied() -> None:
    for rate in ("drop_path_rate", "attn_drop_rate", "proj_drop_rate", "pos_drop_rate", "patch_drop_rate"):
        model = make("plain", **{rate: 0.4})
        images = make_images(model, 4)
        mctf.fuse(model, r=[8] * 4)  # every block fuses, so none takes the host's own forward
        expected = model(images)
        assert not torch.allclose(model.train()(images), expected), rate
