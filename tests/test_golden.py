"""The published implementations' logits and token sizes on DeiT-Tiny, through the public API."""

import functools

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import mctf
from helpers.shared_data import SHARED, needs_shared

GOLDEN = "golden/deit_tiny.npz"
WEIGHTS = "data/deit_tiny_patch16_224.safetensors"
pytestmark = needs_shared(GOLDEN, WEIGHTS)

# The setting as the file names it, and the arguments of mctf.fuse that mean the same.
SETTINGS = {
    "mctf:r=1": {"r": 1},
    "mctf:r=8": {"r": 8},
    "mctf:r=16": {},
    "mctf:ratio=0.35@3,6,9": {"r": 0.35, "blocks": (3, 6, 9)},
    "mctf:r=16,attention=previous": {"attention": "previous"},
    "mctf:r=16,attention=precise": {"attention": "precise"},
    "mctf:r=16,one_way": {"bidirectional": False},
    "mctf:r=16,pool=size": {"pooling": "size"},
    "mctf:r=16,pool=max": {"pooling": "max"},
    "mctf:r=16,pool=mean": {"pooling": "mean"},
    "mctf:r=16,proportional=off": {"proportional": False},
    "mctf:r=16,criteria=sim": {"tau_info": 0, "tau_size": 0},
    "mctf:r=16,criteria=sim+info": {"tau_size": 0},
    "tome:r=16": {"method": "tome"},
}


@functools.cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(SHARED / GOLDEN))


def images() -> Tensor:
    pixels = torch.from_numpy(golden()["images"]).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (pixels - mean[:, None, None]) / std[:, None, None]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    model = timm.create_model("deit_tiny_patch16_224").eval()
    model.load_state_dict({name: value.float() for name, value in load_file(SHARED / WEIGHTS).items()})
    return model


@torch.no_grad()
def test_every_golden_setting_is_covered(model: nn.Module) -> None:
    stored = {name for name in golden() if name.startswith(("mctf:", "tome:"))}
    assert stored == set(SETTINGS)
    np.testing.assert_allclose(model(images()).numpy(), golden()["base"], atol=1e-4)


@pytest.mark.parametrize("setting", SETTINGS)
@torch.no_grad()
def test_logits_and_sizes_are_the_published_ones(model: nn.Module, setting: str) -> None:
    mctf.fuse(model, **SETTINGS[setting])
    try:
        with mctf.trace(model) as trace:
            logits = model(images())
    finally:
        mctf.unfuse(model)
    np.testing.assert_allclose(logits.numpy(), golden()[setting], atol=1e-4)
    if setting.startswith("mctf:"):  # the file has no sizes for ToMe
        np.testing.assert_array_equal(trace.blocks[-1].sizes.numpy(), golden()[f"sizes:{setting}"])


@pytest.mark.parametrize("method", ["mctf", "tome"])
@torch.no_grad()
def test_r_0_is_the_plain_model_bit_for_bit(model: nn.Module, method: str) -> None:
    plain = model(images()[:2])
    mctf.fuse(model, method, r=0)
    fused = model(images()[:2])
    mctf.unfuse(model)
    assert torch.equal(fused, plain)
    assert torch.equal(model(images()[:2]), plain)


@torch.no_grad()
def test_the_fast_preset_is_the_ratio_at_blocks_3_6_9(model: nn.Module) -> None:
    mctf.fuse(model, r="fast")
    logits = model(images())
    mctf.unfuse(model)
    np.testing.assert_allclose(logits.numpy(), golden()["mctf:ratio=0.35@3,6,9"], atol=1e-4)
