"""quantize and unquantize on every kind of host, before and after fusing, and what they refuse."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mctf
from helpers.models import NAMES, by_pickle, make, make_images, run
from mctf.kernels.quantized_linear import KINDS, QuantizedLinear

SOME = ("plain", "registers", "gated", "eva02", "eva_post_norm", "beit_shared", "cait", "relpos", "swiglu", "own_vit")
MODELS = [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "hf_siglip"]


def running(images: Tensor) -> Callable[[nn.Module], object]:
    """Calibration that suits every library."""
    return lambda model: run(model, images)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_quantizing_and_fusing_commute(name: str, kind: str) -> None:
    first, second = make(name), make(name)
    images = make_images(first, 2)
    plain = run(first, images)
    assert mctf.quantize(first, kind, calibration=running(images)) is first
    quantized = run(first, images)
    facts = mctf.Quantization.of(first)
    assert facts is not None
    assert facts.share > 0.3
    assert not torch.equal(quantized, plain)
    mctf.fuse(first, "ward", r=8)
    mctf.quantize(mctf.fuse(second, "ward", r=8), kind, calibration=facts)
    fused = run(first, images)
    assert torch.equal(run(second, images), fused)  # the same scales
    assert not torch.equal(fused, quantized)
    assert torch.equal(run(mctf.unfuse(first), images), quantized)
    assert torch.equal(run(mctf.unquantize(first), images), plain)
    assert torch.equal(run(mctf.unfuse(mctf.unquantize(second)), images), plain)


@torch.inference_mode()
def test_scales_are_those_of_the_inputs() -> None:
    model = make("plain")
    images = make_images(model, 6)
    seen: list[Tensor] = []
    handle = model.blocks[1].mlp.fc2.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].abs().amax()))
    model(images)
    handle.remove()
    batches = [(images[:4], "labels"), (images[4:], "labels")]  # of a loader
    scales = [
        mctf.Quantization.of(mctf.quantize(copy.deepcopy(model), "fp8", calibration=each)).scales
        for each in (images, batches, running(images))
    ]
    assert scales[0] == pytest.approx(scales[1], rel=1e-5)  # products of other batches are summed in another order
    assert scales[0] == scales[2]
    assert scales[0]["blocks.1.mlp.fc2"] == pytest.approx(2 * seen[0].item() / 448, rel=1e-5)
    assert len(scales[0]) == 4 * len(model.blocks)
    for path in ("patch_embed.proj", "head"):
        assert path not in scales[0]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_last_block_is_trimmed_and_state_is_shared(kind: str) -> None:
    model = make("plain")
    images, state = make_images(model, 2), {key: value.clone() for key, value in model.state_dict().items()}
    mctf.quantize(model, kind, calibration=images)
    expected = model(images)
    mctf.fuse(model, "ward", r=0, trim_last=True)
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
    for other in (copy.deepcopy(model), by_pickle(model)):
        assert torch.equal(other(images), model(images))
        assert mctf.Quantization.of(other) == mctf.Quantization.of(model)
    assert model.state_dict().keys() == state.keys()
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])


@torch.inference_mode()
def test_max_kl_keeps_sensitive_layers() -> None:
    model = make("plain")
    images = make_images(model, 8)
    with torch.no_grad():  # one layer whose inputs fp8 cannot hold: a channel far larger than the others
        model.blocks[0].mlp.fc2.weight[:, 0] *= 300
    whole = mctf.quantize(copy.deepcopy(model), "fp8", calibration=images, max_kl=1e9)
    added = mctf.Quantization.of(whole).kl
    assert mctf.Quantization.of(whole).share == 1
    mctf.quantize(model, "fp8", calibration=images, max_kl=added / 2)
    facts = mctf.Quantization.of(model)
    assert 0 < facts.kl <= added / 2
    assert 0 < facts.share < 1
    assert set(facts.kept.values()) == {"sensitive"}
    assert f"{len(facts.kept)} kept: sensitive" in str(facts)
    assert type(model.get_submodule(next(iter(facts.kept)))) is nn.Linear
    with pytest.raises(mctf.MctfError, match="every layer alone adds more than a KL of 0: raise max_kl"):
        mctf.quantize(mctf.unquantize(model), "fp8", calibration=images, max_kl=0)
    assert mctf.Quantization.of(model) is None


def test_layers_that_cannot_be_quantized_are_named() -> None:
    pytest.importorskip("timm")
    odd = mctf.quantize(make("gated"), "fp8", calibration=running(make_images(make("gated"), 1)))
    assert "a size is no multiple of 16" in mctf.Quantization.of(odd).kept.values()
    fused_bias = mctf.quantize(make("beit"), "int8")
    assert mctf.Quantization.of(fused_bias).kept["blocks.0.attn.qkv"] == "its weight is read by the layer around it"
    hooked = make("plain")
    hooked.blocks[0].mlp.fc1.register_forward_hook(lambda *_: None)
    assert mctf.Quantization.of(mctf.quantize(hooked, "int8")).kept == {"blocks.0.mlp.fc1": "with hooks"}
    assert not any("proj_l" in name for name in mctf.Quantization.of(mctf.quantize(make("cait"), "int8")).layers)


REFUSALS: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("fp4",), {}, "precision 'fp4' is unknown"),
    ((8,), {}, "precision 8 is unknown: choose from fp8, int8"),
    (("fp8",), {}, "fp8 needs calibration images: pass calibration=images"),
    (("fp8",), {"calibration": torch.zeros(0, 3, 64, 64)}, "calibration holds no images"),
    (("fp8",), {"calibration": []}, "calibration holds no images"),
    (("fp8",), {"calibration": torch.zeros(3, 64, 64)}, "calibration should be images of B x 3 x H x W"),
    (("fp8",), {"calibration": 5}, "calibration should be images"),
    (("fp8",), {"calibration": {}}, "the calibration is empty"),
    (("fp8",), {"calibration": {"head": 1.0}}, "names 'head', which the model cannot have in fp8"),
    (("fp8",), {"calibration": {"blocks.0.mlp.fc1": -1.0}}, "the scale of blocks.0.mlp.fc1 is -1.0"),
    (("fp8",), {"calibration": lambda model: None}, "no layer of the model ran in calibration"),
    (("fp8",), {"calibration": torch.full((1, 3, 64, 64), torch.nan)}, "are not finite on the calibration images"),
    (("int8",), {"max_kl": 0.1}, "int8 needs calibration images"),
    (("int8",), {"max_kl": "x", "calibration": torch.zeros(1, 3, 64, 64)}, "max_kl='x' must be a finite number"),
    (("int8",), {"max_kl": 0.1, "calibration": lambda model: None}, "max_kl compares outputs on images"),
]


@pytest.mark.parametrize(("given", "options", "message"), REFUSALS)
def test_refusals_leave_the_model_alone(given: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    model = make("plain")
    modules = list(model.modules())
    if isinstance(options.get("calibration"), Tensor) and options["calibration"].dim() == 4:
        images = make_images(model, 1)
        options = options | {
            "calibration": options["calibration"].new_full((len(options["calibration"]), *images.shape[1:]), torch.nan)
        }
    with pytest.raises(mctf.MctfError, match=message):
        mctf.quantize(model, *given, **options)
    assert list(model.modules()) == modules
    assert not any(module._forward_pre_hooks for module in modules)


def test_twice_and_not_at_all(tmp_path: Path) -> None:
    model = mctf.fuse(make("plain"), "tome", r=4)
    with pytest.raises(mctf.MctfError, match="the model is not quantized"):
        mctf.unquantize(model)
    mctf.quantize(model, "int8")
    with pytest.raises(mctf.MctfError, match=r"quantized already: run mctf\.unquantize"):
        mctf.quantize(model, "fp8", calibration=make_images(model, 1))
    with pytest.raises(mctf.MctfError, match="the files would not say so"):
        mctf.save(model, tmp_path)
    with pytest.raises(mctf.MctfError, match=r"the model is quantized: .* precision='int8'"):
        mctf.export(model, tmp_path / "model.pt2", "pt2")
    assert not list(tmp_path.iterdir())
    with pytest.raises(mctf.MctfError, match=r"expected a torch.nn.Module, got str"):
        mctf.quantize("deit", "int8")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_compiled_fused_and_quantized(kind: str) -> None:
    model = make("plain", depth=2)
    images = make_images(model, 2)
    mctf.quantize(mctf.fuse(model, "tome", r=4), kind, calibration=images)
    expected = model(images)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # one graph; its code is tested by layer
    # inputs that rounding moves fall on other quantized numbers
    torch.testing.assert_close(compiled(images), expected, rtol=0.05, atol=0.05)
    assert mctf.Quantization.of(compiled) == mctf.Quantization.of(model)
    assert any(isinstance(module, QuantizedLinear) for module in compiled.modules())
