"""Models quantized by torchao: fused before or after, and unfused again."""

from pathlib import Path
from typing import Any

import pytest
import torch

import mctf
from helpers.models import NAMES, make, make_images, run

PAIRS = [
    ("plain", "mctf"),
    *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("eva02", "mctf_exact"), ("cait", "tome"))),
    *(pytest.param(name, "ward", marks=pytest.mark.slow) for name in NAMES if name == "hf_vit"),
]


def quantize(model: Any, kind: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    config = "Int8WeightOnlyConfig" if kind == "weights" else "Int8DynamicActivationInt8WeightConfig"
    quantization.quantize_(model, getattr(quantization, config)())
    return model


@pytest.mark.parametrize("kind", ["weights", "dynamic"])
@pytest.mark.parametrize(("name", "method"), PAIRS)
@torch.inference_mode()
def test_quantizing_and_fusing_commute(name: str, method: str, kind: str, tmp_path: Path) -> None:
    first, second = quantize(make(name), kind), mctf.fuse(make(name), method, r=8)
    images = make_images(first, 2)
    baseline = run(first, images)
    mctf.fuse(first, method, r=8)
    quantize(second, kind)
    fused = run(first, images)
    assert torch.equal(run(second, images), fused)
    assert not torch.equal(fused, baseline)
    if name == "plain":
        with pytest.raises(
            mctf.MctfError, match="which is not saved: save the model before it is quantized or sharded"
        ):
            mctf.save(first, tmp_path)
        assert not list(tmp_path.iterdir())
    for model in (first, second):
        assert torch.equal(run(mctf.unfuse(model), images), baseline)
