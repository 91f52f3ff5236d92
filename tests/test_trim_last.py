"""A last block that computes only what the head reads: the same logits, fewer FLOPs, off where somebody reads more."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from torch import nn

import mctf
from mctf.stack import features_for_head

IMAGES = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))


def tokens_read(model: nn.Module) -> int:
    """Tokens that the model's own forward hands to its head; forward_head sees them without a hook."""
    seen: list[int] = []
    forward_head = model.forward_head

    def record(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        seen.append(x.shape[1])
        return forward_head(x, *args, **kwargs)

    model.forward_head = record
    try:
        model(IMAGES)
    finally:
        del model.forward_head
    return seen[0]


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
            assert planned.trimmed == (tokens_read(model) == 1)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_an_unfused_model_gets_faster(name: str) -> None:
    model = make(name)
    expected, protected = model(IMAGES), model.num_prefix_tokens
    planned, plain = mctf.plan(model, r=0, trim_last=True), mctf.plan(model, r=0)
    assert planned.gflops < 0.9 * plain.gflops
    mctf.fuse(model, r=0, trim_last=True)
    assert tokens_read(model) == protected
    torch.testing.assert_close(model(IMAGES), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_traces_and_dense_outputs_switch_it_off() -> None:
    model = mctf.fuse(make(), "ward", r=4)
    trimmed = model(IMAGES)
    assert tokens_read(model) == 1
    with mctf.trace(model) as trace:
        torch.testing.assert_close(model(IMAGES), trimmed, rtol=1e-4, atol=1e-5)
        assert tokens_read(model) == 29
    assert trace.token_counts[-1] == 29
    final, _ = model.forward_intermediates(IMAGES)
    assert final.shape[0] == 2
    assert tokens_read(mctf.fuse(make(), "ward", r=4, dense=True)) == 37


@torch.inference_mode()
@pytest.mark.parametrize("name", ["blocks.3", "blocks.3.mlp", "norm", "fc_norm", "head_drop"])
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks_up_to_the_head_switch_it_off(name: str, kind: str) -> None:
    model = mctf.fuse(make(), "ward", r=4)
    handle = getattr(model.get_submodule(name), f"register_{kind}")(lambda *_: None)
    assert tokens_read(model) == 29
    handle.remove()
    assert tokens_read(model) == 1


@torch.inference_mode()
def test_users_get_the_features_of_all_tokens() -> None:
    model = mctf.fuse(make(), "ward", r=4)
    whole = mctf.fuse(make(), "ward", r=4, trim_last=False)
    expected = whole.forward_features(IMAGES)
    torch.testing.assert_close(model.forward_features(IMAGES), expected)
    assert features_for_head(model, IMAGES).shape[1] == tokens_read(model) == 1
    with pytest.raises(AssertionError):
        model(IMAGES[..., :80])  # fails before the blocks
    torch.testing.assert_close(model.forward_features(IMAGES), expected)

    def read_in_hook(*_: object) -> None:  # in another thread, while a forward pass runs
        seen = ThreadPoolExecutor().submit(torch.inference_mode()(lambda: model.forward_features(IMAGES))).result()
        torch.testing.assert_close(seen, expected)

    with model.patch_embed.register_forward_pre_hook(_once(read_in_hook)):
        assert tokens_read(model) == 1
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert tokens_read(again) == 1
        assert again.forward_features(IMAGES).shape[1] == 29
    mctf.unfuse(model)
    assert not any((model._forward_hooks, model._forward_pre_hooks, model._forward_hooks_always_called))


def _once(function: Callable[..., None]) -> Callable[..., None]:
    """The function in its first call; nothing in later ones."""
    calls = iter([function])
    return lambda *args: next(calls, lambda *_: None)(*args)


@torch.inference_mode()
@pytest.mark.parametrize("pool", ["avg", "map", ""])
def test_models_that_read_every_token_are_not_trimmed(pool: str) -> None:
    options = {"class_token": False} if pool == "map" else {}
    model = make(global_pool=pool, num_classes=5, **options)
    planned = mctf.plan(model, method="ward", r=4)
    assert not planned.trimmed
    fused = mctf.fuse(model, "ward", r=4)
    assert tokens_read(fused) == fused.forward_features(IMAGES).shape[1] == planned.image_tokens


def test_gradients_and_compilation() -> None:
    model = mctf.fuse(make(), "ward", r=4)
    tokens: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        values = [node.meta["example_value"] for node in graph.graph.nodes if "example_value" in node.meta]
        *_, last = (value.shape[1] for value in values if isinstance(value, torch.Tensor) and value.dim() == 3)
        tokens.append(last)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(IMAGES), model(IMAGES))
    features = torch.compile(model.forward_features, fullgraph=True, backend=backend)
    torch.testing.assert_close(features(IMAGES), model.forward_features(IMAGES))
    assert tokens == [1, 29]
    model.train()(IMAGES).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


@pytest.mark.parametrize("value", [1, "yes", 0.5, []])
def test_it_is_a_switch(value: object) -> None:
    model = make()
    for call in (mctf.fuse, mctf.plan):
        with pytest.raises(mctf.MctfError, match="trim_last"):
            call(model, trim_last=value)
