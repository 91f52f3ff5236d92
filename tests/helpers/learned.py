"""Learned methods for tests: layers with fixed random values, and naive versions of those layers."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mctf
from helpers.models import make, make_images
from helpers.naive import NaiveBlock, assert_as_naive
from mctf.methods._layers import UntrainedWarning, split_state_dict, stash_layers


def teach(model: nn.Module, method: str, r: Any, *, seed: int = 0, **options: Any) -> dict[str, Tensor]:
    """Stash layers with random values in a model and return them; the next fuse with this method takes them.

    The values are so large that no score is near another.
    """
    with warnings.catch_warnings(action="ignore", category=UntrainedWarning):
        mctf.fuse(model, method, r=r, **options)
    generator = torch.Generator().manual_seed(seed)
    _, layers = split_state_dict(model.state_dict())
    for name, value in layers.items():
        value.copy_(torch.randn(value.shape, generator=generator).to(value.dtype) / max(1, value[0].numel()) ** 0.5)
        if name.endswith("read.0.weight"):  # of a LayerNorm
            value.add_(1)
    layers = {name: value.clone() for name, value in layers.items()}
    mctf.unfuse(model)
    stash_layers(model, layers)
    return layers


def taught_model(name: str, method: str, r: Any, **features: Any) -> Any:
    """A fused model in float64 with the layers of `teach`."""
    model = make(name, **features).double()
    teach(model, method, r)
    return mctf.fuse(model, method, r=r)


def assert_as_taught_or_refused(
    name: str, naive: Callable[[dict[str, Tensor]], NaiveBlock], *, method: str, schedule: Sequence[float]
) -> None:
    """The model equals `naive` with the same layers, or is refused for talking heads (CaiT)."""
    model = make(name).double()
    if name.startswith("cait"):
        assert_refused_for_talking_heads(model, method)
        return
    block = naive(teach(model, method, list(schedule)))
    assert_as_naive(model, make_images(model, 2), block, method=method, schedule=schedule, with_sizes=False)


def assert_refused_for_talking_heads(model: nn.Module, method: str) -> None:
    """The error names the reason, and the model can still be fused by another method."""
    with pytest.raises(mctf.MctfError, match=r"which talking heads \(CaiT\) do not support: use '"):
        mctf.fuse(model, method)
    mctf.unfuse(mctf.fuse(model, "tome", r=4))


def linear(layers: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ layers[f"{name}.weight"].T + layers[f"{name}.bias"]


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def layer_norm(layers: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean()
    scaled = centred / (centred.square().mean() + 1e-5).sqrt()
    return scaled * layers[f"{name}.weight"] + layers[f"{name}.bias"]


def perceptron(layers: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Three linear layers with GELU between them: two logits."""
    return linear(layers, f"{name}.4", gelu(linear(layers, f"{name}.2", gelu(linear(layers, f"{name}.0", x)))))
