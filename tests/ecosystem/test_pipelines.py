"""Pipelines of transformers with fused models."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mctf
from helpers.models import make

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")


def pictures() -> list[Image.Image]:
    return [Image.fromarray(np.random.default_rng(seed).integers(0, 255, (80, 70, 3), np.uint8)) for seed in range(2)]


def make_pipeline(task: str, model: Any) -> Any:
    side = {"height": 64, "width": 64}
    return transformers.pipeline(
        task, model=model, image_processor=transformers.ViTImageProcessor(size=side), device="cpu"
    )


@torch.no_grad()
def test_image_classification() -> None:
    model = make("hf_vit")
    classify = make_pipeline("image-classification", model)
    baseline = classify(pictures(), top_k=10)
    mctf.fuse(model, r=16)
    fused = classify(pictures(), top_k=10)
    for result, plain in zip(fused, baseline, strict=True):
        assert sum(each["score"] for each in result) == pytest.approx(1, abs=1e-5)
        assert result != plain
    mctf.set_r(model, 0)
    assert classify(pictures(), top_k=10) == baseline
    mctf.unfuse(model)
    assert classify(pictures(), top_k=10) == baseline


@torch.no_grad()
def test_image_feature_extraction() -> None:
    model = make("hf_vit").vit
    extract = make_pipeline("image-feature-extraction", model)
    baseline = extract(pictures()[0])
    mctf.fuse(model, r=16)
    fused = extract(pictures()[0])
    assert np.shape(fused) == np.shape(baseline) == (1, 65, 48)  # one token per input token
    assert fused != baseline
    mctf.unfuse(model)
    assert extract(pictures()[0]) == baseline
