"""A linear layer in fp8 or int8: the product runs on quantized weights and inputs, everything around it is unchanged.

    fp8   y = s_x s_w (q_x q_w^T) + b,  q = clamp(x / s) in float8_e4m3fn, s one number per layer, s_x fixed beforehand
    int8  y = s_x s_w (q_x q_w^T) + b,  q = round(x / s) in int8, s_w one number per channel, s_x per token as it comes

fp8 runs by `torch._scaled_mm` on a GPU with such tensor cores, int8 by `torch._int_mm` on a CPU. Elsewhere the
quantized numbers are multiplied in float32: the same result within rounding of sums, and no faster than the
unquantized layer.

Axes: T tokens of all images, K input channels, N output channels.
"""

from collections.abc import Callable
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MctfError
from . import launch

KINDS = ("fp8", "int8")
FP8_MULTIPLE = 16  # of K and N, which the tensor cores want
_FP8, _INT8 = torch.float8_e4m3fn, torch.int8
_LARGEST = {"fp8": 448.0, "int8": 127.0}
_SMALLEST_SCALE = 1e-12  # of a layer or token that is all zeros
_DATA = ("quantized", "weight_scale", "input_scale", "inverse_scale")


class QuantizedLinear(nn.Linear):
    """A linear layer that shares its parameters with the one it replaces and multiplies by a quantized copy.

    The state_dict is that of the unquantized layer; a state_dict that is loaded is quantized again. `to(dtype)` leaves
    the quantized copy as it is.

    quantized: N K. weight_scale: 1 in fp8, N in int8. input_scale, inverse_scale: 1 in fp8, empty in int8; all float32.
    """

    kind: str
    native: bool
    quantized: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    inverse_scale: Tensor

    @classmethod
    def of(cls, linear: nn.Linear, kind: str, input_scale: float | None = None) -> Self:
        """The quantized layer. input_scale: of fp8, a real input divided by it is at most 448."""
        layer = cls.__new__(cls)
        layer.__dict__.update(linear.__dict__)
        layer.__dict__["_buffers"] = dict(linear._buffers)
        layer.__dict__["_non_persistent_buffers_set"] = set(linear._non_persistent_buffers_set)
        layer.__dict__["linear"] = (linear,)  # in a tuple: as a module it would be registered
        layer.kind = kind
        scale = torch.tensor([] if input_scale is None else [input_scale], dtype=torch.float32)
        scale = scale.to(linear.weight.device)
        for name, value in (("input_scale", scale), ("inverse_scale", 1 / scale)):
            layer.register_buffer(name, value, persistent=False)
        quantized, weight_scale = quantize_weight(linear.weight, kind)
        layer.register_buffer("quantized", quantized, persistent=False)
        layer.register_buffer("weight_scale", weight_scale, persistent=False)
        layer.native = _is_native(kind, quantized.device)
        return layer

    def restored(self) -> nn.Linear:
        """The layer that this replaces."""
        (linear,) = cast(Any, self.linear)
        linear.training = self.training
        linear._parameters.update(self._parameters)
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """... K -> ... N."""
        return self.rows(x, 0, self.out_features)

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Output channels start .. stop alone: ... K -> ... (stop - start)."""
        if torch.is_grad_enabled() and (x.requires_grad or self.training):
            raise MctfError(
                f"a model in {self.kind} has no gradients: run it under torch.inference_mode(), "
                "or run mctf.unquantize(model) first"
            )
        tokens = x.reshape(-1, x.shape[-1])
        # inductor of PyTorch 2.11 compiles no product with a part of an fp8 matrix
        product = self._fp8(tokens)[:, start:stop] if self.kind == "fp8" else self._int8(tokens, start, stop)
        return product.unflatten(0, x.shape[:-1])

    def _fp8(self, x: Tensor) -> Tensor:
        weight, bias = self.quantized, self.bias
        largest = _LARGEST["fp8"]
        quantized = (x.float() * self.inverse_scale).clamp(-largest, largest).to(_FP8)
        if not (self.native and launch.enabled and x.is_cuda):
            product = F.linear(quantized.float(), weight.float()) * (self.input_scale * self.weight_scale)
            return _finish(product, bias, x.dtype)
        short = x.dtype in (torch.bfloat16, torch.float16)
        product = torch._scaled_mm(
            quantized,
            weight.t(),
            scale_a=self.input_scale,
            scale_b=self.weight_scale,
            bias=bias if short else None,  # the product takes none in float32
            out_dtype=x.dtype if short else torch.float32,
            use_fast_accum=True,
        )
        return product if short else _finish(product, bias, x.dtype)

    def _int8(self, x: Tensor, start: int, stop: int) -> Tensor:
        weight, bias = self.quantized[start:stop], None if self.bias is None else self.bias[start:stop]
        x32 = x.float()
        scale = x32.abs().amax(1, keepdim=True).clamp_min(_SMALLEST_SCALE) / _LARGEST["int8"]
        quantized = (x32 / scale).round().to(_INT8)
        if self.native and launch.enabled and not x.is_cuda:
            product = torch._int_mm(quantized, weight.t()) * scale
        else:
            product = F.linear(quantized.float(), weight.float()) * scale
        return _finish(product * self.weight_scale[start:stop], bias, x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the quantized copy as bytes, which no change of dtype touches."""
        data = {name: self._buffers.pop(name) for name in _DATA}
        super()._apply(fn, recurse)
        for name, value in data.items():
            value = cast(Tensor, value)
            self._buffers[name] = fn(value.view(torch.uint8)).view(value.dtype)
        self.native = _is_native(self.kind, self.quantized.device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.quantized, self.weight_scale = quantize_weight(self.weight, self.kind)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.native = _is_native(self.kind, self.quantized.device)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.kind}"


def _finish(product: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (product if bias is None else product + bias.float()).to(dtype)


@torch.no_grad()
def quantize_weight(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The quantized weight (N K) and its scale: of the layer in fp8 (1), of each output channel in int8 (N)."""
    weight = weight.detach().float()
    largest = _LARGEST[kind]
    if kind == "fp8":
        scale = (weight.abs().amax().clamp_min(_SMALLEST_SCALE) / largest)[None]
        return (weight / scale).clamp(-largest, largest).to(_FP8), scale
    scale = weight.abs().amax(1).clamp_min(_SMALLEST_SCALE) / largest
    return (weight / scale[:, None]).round().to(_INT8), scale


def _is_native(kind: str, device: torch.device) -> bool:
    """Whether the device multiplies these numbers itself. Found out when a model is moved: compiled code cannot ask."""
    if kind == "int8":
        return device.type == "cpu"
    # consumer and data center GPUs from Ada and Hopper on; ROCm has other float8 formats
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 9)
    )
