"""A last block that computes only what the head reads: the same logits, fewer FLOPs, off where somebody reads more."""

import pytest
import timm
import torch
from torch import nn

import mctf
from mctf.api import fused_stack

IMAGES = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))


def make(name: str = "vit_tiny_patch16_224", **options: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, img_size=96, depth=4, **options).eval()


@torch.inference_mode()
@pytest.mark.parametrize("method", sorted(mctf.methods()))
@pytest.mark.filterwarnings("ignore")
def test_logits_stay(method: str) -> None:
    results = []
    for trim_last in (False, True):
        torch.manual_seed(1)
        model = mctf.fuse(make(), method, trim_last=trim_last)
        torch.manual_seed(2)
        results.append(model(IMAGES))
        if trim_last:
            planned = mctf.plan(make(), method=method, trim_last=True)
            assert planned.trimmed == (model.forward_features(IMAGES).shape[1] == 1)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_an_unfused_model_gets_faster(name: str) -> None:
    model = make(name)
    expected, protected = model(IMAGES), model.num_prefix_tokens
    planned, plain = mctf.plan(model, r=0, trim_last=True), mctf.plan(model, r=0)
    assert planned.gflops < 0.9 * plain.gflops
    mctf.fuse(model, r=0, trim_last=True)
    assert model.forward_features(IMAGES).shape[1] == protected
    torch.testing.assert_close(model(IMAGES), expected, rtol=1e-4, atol=1e-5)


def _hooked(model: nn.Module) -> None:
    list(fused_stack(model).children())[-1].mlp.register_forward_hook(lambda *_: None)


@torch.inference_mode()
def test_hooks_traces_and_dense_outputs_switch_it_off() -> None:
    model = mctf.fuse(make(), "ward", r=4)
    trimmed = model(IMAGES)
    assert model.forward_features(IMAGES).shape[1] == 1
    with mctf.trace(model) as trace:
        torch.testing.assert_close(model(IMAGES), trimmed, rtol=1e-4, atol=1e-5)
        assert model.forward_features(IMAGES).shape[1] == 29
    assert trace.token_counts[-1] == 29
    final, _ = model.forward_intermediates(IMAGES)
    assert final.shape[0] == 2
    _hooked(model)
    assert model.forward_features(IMAGES).shape[1] == 29
    assert mctf.fuse(make(), "ward", r=4, dense=True).forward_features(IMAGES).shape[1] == 37


@torch.inference_mode()
@pytest.mark.parametrize("pool", ["avg", "map", ""])
def test_models_that_read_every_token_are_not_trimmed(pool: str) -> None:
    options = {"class_token": False} if pool == "map" else {}
    model = make(global_pool=pool, num_classes=5, **options)
    planned = mctf.plan(model, method="ward", r=4)
    assert not planned.trimmed
    assert mctf.fuse(model, "ward", r=4).forward_features(IMAGES).shape[1] == planned.image_tokens


def test_gradients_and_compilation() -> None:
    model = mctf.fuse(make(), "ward", r=4)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(IMAGES), model(IMAGES))
    model.train()(IMAGES).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


@pytest.mark.parametrize("value", [1, "yes", 0.5, []])
def test_it_is_a_switch(value: object) -> None:
    model = make()
    for call in (mctf.fuse, mctf.plan):
        with pytest.raises(mctf.MctfError, match="trim_last"):
            call(model, trim_last=value)
