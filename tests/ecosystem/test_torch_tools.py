"""Tools of PyTorch on fused models: jit.trace, vmap over gradients, torch.fx, torch.func."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

import mctf
from helpers.models import make, make_images
from mctf.methods._layers import UntrainedWarning

# in float64 no near-tie is decided by rounding, so that values can be compared
METHODS = ("mctf", "mctf_exact", "tome", "ward", "evit", "pitome", "diffrate", "atc", "bat", "spvit", "evo_vit")
TRACED = (("plain", "ward"), ("plain", "evit"), ("eva02", "tome"), ("cait", "tome"), ("registers", "mctf_exact"))
ADAPTIVE = ("ats", "a_vit", "ia_red2")


def fused(method: str, name: str = "plain", **features: Any) -> Any:
    with warnings.catch_warnings(action="ignore", category=UntrainedWarning):
        return mctf.fuse(make(name, **features).double(), method, r=0.2 if method in ("spvit", "evo_vit") else 8)


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize(
    ("name", "method"),
    [("plain", "mctf"), ("plain", "tome"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in TRACED)],
)
def test_a_traced_model_takes_any_batch(name: str, method: str) -> None:
    check_trace(fused(method, name, depth=2))


def check_trace(model: Any) -> None:
    """Traced with gradient and checked by PyTorch without, the program equals the model at every batch."""
    traced = torch.jit.trace(model, make_images(model, 2))
    for batch in (1, 2, 5):
        images = make_images(model, batch, seed=batch)
        torch.testing.assert_close(traced(images), model(images), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_a_trace_takes_a_larger_batch_than_one_chunk_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU attention maps are made a few images at a time: a trace must not record how many."""
    monkeypatch.setattr("mctf.core.attention._CPU_CHUNK", 1)
    check_trace(fused("mctf_exact", depth=2))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # loops over images inside PyTorch
@pytest.mark.parametrize("method", METHODS)
def test_per_sample_gradients(method: str) -> None:
    model = fused(method)
    images = make_images(model, 3)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: dict[str, Tensor], image: Tensor) -> Tensor:
        return functional_call(model, values, (image[None],)).square().mean()

    together = vmap(grad(loss), in_dims=(None, 0))(parameters, images)
    for index, image in enumerate(images):
        for name, gradient in grad(loss)(parameters, image).items():
            torch.testing.assert_close(together[name][index], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("method", ADAPTIVE)
def test_tools_that_freeze_decisions_refuse_adaptive_methods(method: str) -> None:
    with warnings.catch_warnings(action="ignore", category=UntrainedWarning):
        model = mctf.fuse(make("plain"), method)
    images = make_images(model, 2)
    with pytest.raises(mctf.MctfError, match=r"depends on the images.*: use a method that keeps equally many"):
        torch.jit.trace(model, images)
    with pytest.raises(mctf.MctfError, match="depends on the images"):
        vmap(lambda image: model(image[None]))(images)


def test_fx_is_refused_in_one_line() -> None:
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    model = make("plain")
    extraction.create_feature_extractor(model, ["blocks.1"])
    with pytest.raises(mctf.MctfError, match=r"cannot be traced by torch\.fx.*: use timm's forward_intermediates"):
        extraction.create_feature_extractor(mctf.fuse(model, r=8), ["blocks"])
