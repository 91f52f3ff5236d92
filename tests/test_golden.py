"""The published implementations' logits and token sizes on DeiT-Tiny, through the public API.

Rounding differs between CPUs, and where two pairs score within rounding of each other it decides which one is merged.
So an image agrees if its logits and sizes are the published ones, or become so once every pair score is perturbed by at
most MARGIN: then a near-tie was decided the other way. The perturbed trace names the block.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import mctf
from helpers.shared_data import SHARED, needs_shared
from mctf.core import matching

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


TOLERANCE = 1e-4  # float32 implementations of the same method agree to about 1e-5
MARGIN = 1e-6  # relative; float32 pair scores differ by a few 1e-7 between CPUs
ATTEMPTS = 24  # perturbations tried; each decides every near-tie of an image by chance
MOST = 0.85  # share of images and settings that agree without any perturbation


@dataclass
class Agreement:
    """How one setting agrees with the published numbers.

    plain: per image, whether it agrees as it is. tied: of the other images, the block whose near-tie was decided the
    other way; None where no perturbation brings the published numbers about.
    """

    plain: list[bool]
    tied: dict[int, int | None]


def agree(logits: Tensor, trace: mctf.Trace, setting: str, chosen: list[int]) -> list[bool]:
    """Per image, whether logits and sizes are the published ones of the chosen images."""
    expected = torch.from_numpy(golden()[setting])[chosen]
    same = (logits - expected).abs().amax(dim=1) <= TOLERANCE
    if f"sizes:{setting}" in golden():  # the file has no sizes for ToMe
        sizes = torch.from_numpy(golden()[f"sizes:{setting}"])[chosen]
        same &= (trace.blocks[-1].sizes == sizes).all(dim=1)
    return same.tolist()


@contextmanager
def perturbed_scores(seed: int) -> Iterator[None]:
    """Inside, every pair score is multiplied by a random number from 1 - MARGIN to 1 + MARGIN."""
    generator = torch.Generator().manual_seed(seed)

    def perturbing(match: Any) -> Any:
        def run(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
            noise = 2 * torch.rand(scores.shape, generator=generator) - 1
            return match(scores * (1 + MARGIN * noise), *args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("match_bidirectional", "match_one_way"):
            patch.setattr(matching, name, perturbing(getattr(matching, name)))
        yield


def compare(model: nn.Module, setting: str, options: dict[str, Any]) -> Agreement:
    mctf.fuse(model, **options)
    try:
        with mctf.trace(model) as whole:
            plain = agree(model(images()), whole, setting, list(range(8)))
        tied: dict[int, int | None] = {}
        for image in (index for index, same in enumerate(plain) if not same):
            tied[image] = None
            for seed in range(ATTEMPTS):
                with perturbed_scores(seed), mctf.trace(model) as trace:
                    logits = model(images()[image : image + 1])
                if agree(logits, trace, setting, [image]) == [True]:
                    tied[image] = first_difference(whole, trace, image)
                    break
    finally:
        mctf.unfuse(model)
    return Agreement(plain, tied)


def first_difference(whole: mctf.Trace, alone: mctf.Trace, image: int) -> int | None:
    """The first block in which the image is merged differently in the two traces."""
    pairs = enumerate(zip(whole.blocks, alone.blocks, strict=True))
    return next((i for i, (a, b) in pairs if not torch.equal(a.assignment.slots[image], b.assignment.slots[0])), None)


def assert_published(agreement: Agreement) -> None:
    unexplained = [image for image, block in agreement.tied.items() if block is None]
    assert not unexplained, f"images {unexplained} differ from the published numbers by more than near-ties"
    assert sum(agreement.plain) > len(agreement.plain) / 2  # the median image agrees


@pytest.fixture(scope="module")
def agreements(model: nn.Module) -> dict[str, Agreement]:
    with torch.no_grad():
        return {setting: compare(model, setting, options) for setting, options in SETTINGS.items()}


@torch.no_grad()
def test_every_golden_setting_is_covered(model: nn.Module) -> None:
    stored = {name for name in golden() if name.startswith(("mctf:", "tome:"))}
    assert stored == set(SETTINGS)
    np.testing.assert_allclose(model(images()).numpy(), golden()["base"], atol=TOLERANCE)


def test_logits_and_sizes_are_the_published_ones(agreements: dict[str, Agreement]) -> None:
    for setting, agreement in agreements.items():
        print(setting, "near-ties at (image, block):", *agreement.tied.items())
        assert_published(agreement)


def test_most_images_agree_without_perturbation(agreements: dict[str, Agreement]) -> None:
    plain = [same for agreement in agreements.values() for same in agreement.plain]
    assert np.mean(plain) >= MOST


@pytest.mark.parametrize(
    "wrong",
    [{"tau_info": 1 / 19}, {"tau_size": 0}, {"bidirectional": False}, {"pooling": "size"}, {"tau_sim": 0.95}],
    ids=lambda wrong: next(iter(wrong)),
)
@torch.no_grad()
def test_a_slightly_wrong_method_would_be_noticed(
    model: nn.Module, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ATTEMPTS", 2)
    with pytest.raises(AssertionError, match=r"differ from the published numbers|assert"):
        assert_published(compare(model, "mctf:r=16", wrong))


@pytest.mark.parametrize("method", ["mctf", "tome"])
@torch.no_grad()
def test_r_0_is_the_unfused_model_bit_for_bit(model: nn.Module, method: str) -> None:
    plain = model(images()[:2])
    mctf.fuse(model, method, r=0)
    fused = model(images()[:2])
    mctf.unfuse(model)
    assert torch.equal(fused, plain)
    assert torch.equal(model(images()[:2]), plain)


@torch.no_grad()
def test_the_fast_preset_is_the_ratio_at_blocks_3_6_9(model: nn.Module) -> None:
    assert_published(compare(model, "mctf:ratio=0.35@3,6,9", {"r": "fast"}))
