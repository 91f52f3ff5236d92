"""Feature maps of a fused timm model: one value per input token, by every interface of timm."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mctf
from helpers.models import CHOSEN, DEPTH, METHODS, PAIRS, family_of, make, make_images, names_of

TIMM = names_of(lambda family: family.timm)
every_pair = pytest.mark.parametrize(("name", "method"), [pair for pair in PAIRS if pair[0] in TIMM])
every_method = pytest.mark.parametrize("method", METHODS)

REQUESTS: list[dict[str, Any]] = [
    {},
    {"indices": 2, "output_fmt": "NLC", "norm": True},
    {"indices": [0, 2], "stop_early": True, "return_prefix_tokens": True},
    {"indices": [1], "stop_early": True, "intermediates_only": True, "output_fmt": "NLC"},
    {"output_dict": True, "return_prefix_tokens": True, "norm": True},
]


def requests_to(model: nn.Module) -> list[dict[str, Any]]:
    """The requests that this model supports; some of timm's fail without prefix tokens."""
    parameters = set(inspect.signature(model.forward_intermediates).parameters)
    if family_of(model).prefix(model) == 0:
        parameters -= {"return_prefix_tokens"}
    return [request for request in REQUESTS if set(request) <= parameters]


def tensors(result: Any) -> list[Tensor]:
    """All tensors of a nested result, in order."""
    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, dict) else result
    return [tensor for part in parts for tensor in tensors(part)]


def features(model: nn.Module, images: Tensor) -> list[list[Tensor]]:
    """The tensors that each request returns."""
    return [tensors(model.forward_intermediates(images, **request)) for request in requests_to(model)]


@every_pair
@torch.no_grad()
def test_with_r_0_features_are_the_baselines(name: str, method: str) -> None:
    model = make(name)
    images = make_images(model, 2)
    plain = features(model, images)
    mctf.fuse(model, method, r=0)
    for fused, expected in zip(features(model, images), plain, strict=True):
        assert len(fused) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(fused, expected, strict=True))


@pytest.mark.parametrize("name", [name for name in CHOSEN if name in TIMM])
@torch.no_grad()
def test_features_keep_their_shapes(name: str) -> None:
    model = make(name)
    images = make_images(model, 2)
    plain = features(model, images)
    mctf.fuse(model, r=8)
    for fused, expected in zip(features(model, images), plain, strict=True):
        assert [tensor.shape for tensor in fused] == [tensor.shape for tensor in expected]
        assert all(tensor.isfinite().all() for tensor in fused)


@every_pair
@torch.no_grad()
def test_features_are_the_unpooled_fused_tokens(name: str, method: str) -> None:
    model = make(name)
    images = make_images(model, 2)
    mctf.fuse(model, method, r=8, restore="copy")
    family = family_of(model)
    prefix = family.prefix(model)
    with mctf.trace(model) as trace:
        final, maps = model.forward_intermediates(images, output_fmt="NLC", norm=True)
    assert len(trace.blocks) == DEPTH
    for index, features in enumerate(maps):
        source = trace.source_map(index)[:, prefix:] - prefix
        slots = torch.zeros(2, trace.token_counts[index] - prefix, family.width(model))
        slots.scatter_(1, source[..., None].expand_as(features), features)
        assert torch.equal(slots.gather(1, source[..., None].expand_as(features)), features)

    # and the pass over all blocks at once computes the same tokens
    whole = family.features(model, images)
    every = whole if family.keeps_every_token(model) else trace.unpool(whole)
    assert torch.equal(final, every)


@torch.no_grad()
def test_stopping_early_gives_the_same_features() -> None:
    model = mctf.fuse(make("registers"), r=8)
    images = make_images(model, 2)
    _, all_maps = model.forward_intermediates(images, indices=[0, 2])
    with mctf.trace(model) as trace:
        _, maps = model.forward_intermediates(images, indices=[0, 2], stop_early=True)
    assert len(trace.blocks) == 3
    for one, other in zip(maps, all_maps, strict=True):
        assert torch.equal(one, other)


@every_method
def test_features_with_gradient_checkpointing(method: str) -> None:
    model = make("plain").double().train()
    images = make_images(model, 2)
    mctf.fuse(model, method, r=8)
    gradients = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        sum(features.square().sum() for features in model.forward_intermediates(images)[1]).backward()
        gradients.append([parameter.grad.clone() for parameter in model.blocks.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_the_dino_interface_gives_one_feature_per_patch() -> None:
    model = mctf.fuse(make("registers"), r=8)
    (features,) = model.get_intermediate_layers(make_images(model, 2), n=1, reshape=True)
    assert features.shape == (2, 48, 8, 8)
