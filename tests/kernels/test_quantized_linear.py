"""Quantized linear layers: numbers, slices, dtypes and state, and the fp8 product of a GPU against its emulation."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import mctf
from mctf.kernels import disable_kernels
from mctf.kernels.quantized_linear import KINDS, QuantizedLinear

FP8_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
SCALE = 0.02  # inputs of up to 9 fit


def make(
    kind: str, dtype: torch.dtype = torch.float32, *, bias: bool = True
) -> tuple[nn.Linear, QuantizedLinear, Tensor]:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 96, bias=bias).eval()
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.normal_(generator=generator)
    linear = linear.to(dtype)
    x = torch.randn(2, 5, 64, generator=generator).to(dtype)
    return linear, QuantizedLinear.of(linear, kind, SCALE if kind == "fp8" else None), x


def by_definition(linear: nn.Linear, kind: str, x: Tensor) -> Tensor:
    """The formulas of the module, in float64."""
    weight, x = linear.weight.double(), x.double()
    if kind == "fp8":
        scale = weight.abs().max() / 448
        rounded_x = (x.float() * (1 / torch.tensor(SCALE))).clamp(-448, 448).to(torch.float8_e4m3fn).double() * SCALE
        rounded = (linear.weight.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
    else:
        scale, scale_x = weight.abs().amax(1, keepdim=True) / 127, x.abs().amax(-1, keepdim=True) / 127
        rounded_x, rounded = (x / scale_x).round() * scale_x, (weight / scale).round() * scale
    return rounded_x @ rounded.T + linear.bias.double()


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_product_is_that_of_rounded_numbers(kind: str) -> None:
    linear, layer, x = make(kind)
    torch.testing.assert_close(layer(x).double(), by_definition(linear, kind, x), rtol=1e-4, atol=1e-4)
    with disable_kernels():
        torch.testing.assert_close(layer(x).double(), by_definition(linear, kind, x), rtol=1e-4, atol=1e-4)
    error = (layer(x) - linear(x)).norm() / linear(x).norm()
    assert 1e-3 < error < (0.06 if kind == "fp8" else 0.02)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_slices_are_columns_of_the_whole(kind: str) -> None:
    _, layer, x = make(kind)
    whole = layer(x)
    parts = [layer.rows(x, 0, 32), layer.rows(x, 32, 96)]
    torch.testing.assert_close(torch.cat(parts, dim=-1), whole, rtol=1e-6, atol=1e-6)
    assert layer(x[:0]).shape == (0, 5, 96)
    assert layer(x[0]).shape == (5, 96)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_reduced_precision_and_back(kind: str, dtype: torch.dtype) -> None:
    _, layer, x = make(kind)
    expected, quantized = layer(x), layer.quantized.clone()
    reduced = copy.deepcopy(layer).to(dtype)
    assert reduced.bias.dtype == reduced(x.to(dtype)).dtype == dtype
    assert reduced.quantized.dtype == quantized.dtype  # a change of dtype does not touch it
    assert reduced.weight_scale.dtype == torch.float32
    # the output is rounded, and so is the input, which moves a few numbers to their neighbours
    error = (reduced(x.to(dtype)).float() - expected).norm() / expected.norm()
    assert error < 0.02
    torch.testing.assert_close(reduced.float()(x), expected, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_copies_and_state(kind: str) -> None:
    linear, layer, x = make(kind)
    expected = layer(x)
    assert layer.state_dict().keys() == linear.state_dict().keys()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for same in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(same(x), expected)
        assert type(same.restored()) is nn.Linear
        assert torch.equal(same.restored()(x), linear(x))
    other, _, _ = make(kind)
    other.weight.mul_(2)
    fresh = QuantizedLinear.of(other, kind, SCALE if kind == "fp8" else None)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), fresh(x))  # quantized again


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_refused(kind: str) -> None:
    _, layer, x = make(kind)
    with pytest.raises(mctf.MctfError, match=rf"a model in {kind} has no gradients: run it under torch.inference_mode"):
        layer(x.requires_grad_())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_compiled(kind: str) -> None:
    _, layer, x = make(kind)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(not FP8_GPU, reason="needs a GPU with fp8 tensor cores")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
@torch.inference_mode()
def test_fp8_on_a_gpu(dtype: torch.dtype, bias: bool, compiled: bool) -> None:
    _, layer, x = make("fp8", dtype, bias=bias)
    layer, x = layer.cuda(), x.cuda()
    assert layer.native
    with disable_kernels():
        emulated, part = layer(x), layer.rows(x, 16, 48)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    # fast accumulation keeps about 14 bits of a sum
    torch.testing.assert_close(run(x), emulated, rtol=0.02, atol=0.02)
    torch.testing.assert_close(layer.rows(x, 16, 48), part, rtol=0.02, atol=0.02)
