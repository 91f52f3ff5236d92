"""Models quantized by torchao: fused before or after, and unfused again."""

from typing import Any

import pytest
import torch

import mctf
from helpers.models import make, make_images, run

NAMES = ("plain", "eva02", "cait", "hf_vit")


def quantize(model: Any, kind: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    config = "Int8WeightOnlyConfig" if kind == "weights" else "Int8DynamicActivationInt8WeightConfig"
    quantization.quantize_(model, getattr(quantization, config)())
    return model


@pytest.mark.parametrize("kind", ["weights", "dynamic"])
@pytest.mark.parametrize(("name", "method"), zip(NAMES, ("mctf", "mctf_exact", "tome", "ward"), strict=True))
@torch.inference_mode()
def test_quantizing_and_fusing_commute(name: str, method: str, kind: str) -> None:
    first, second = quantize(make(name), kind), mctf.fuse(make(name), method, r=8)
    images = make_images(first, 2)
    baseline = run(first, images)
    mctf.fuse(first, method, r=8)
    quantize(second, kind)
    fused = run(first, images)
    assert torch.equal(run(second, images), fused)
    assert not torch.equal(fused, baseline)
    for model in (first, second):
        assert torch.equal(run(mctf.unfuse(model), images), baseline)
