"""int8 in exported files: linear layers of the blocks quantized by ONNX Runtime, after calibration on images.

The weights become int8 with one scale per output channel, their inputs uint8 with one range per layer. Everything else
stays float32, the distances of matching and clustering too: two nearly equal tokens would otherwise tie.

Axes: B images, 3 H W.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import MctfError
from ..kernels.quantized_linear import QuantizedLinear
from ..quantization import linear_layers, quantize
from .formats import quiet

_BATCH = 1  # of calibration: ranges do not depend on it, and every file takes it
_OPERATORS = ["MatMul", "Gemm"]


def quantize_onnx(path: Path, layers: Iterable[nn.Linear], images: Tensor, *, batch: int | None) -> None:
    """Quantize these layers in an ONNX file, in place. batch: the fixed batch size of the file."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    external = path.with_name(f"{path.name}.data").exists()
    wanted = {_digest(weight) for layer in layers for weight in (layer.weight.T, layer.weight)}
    graph = onnx.load(str(path)).graph
    ours = {
        each.name
        for each in graph.initializer
        if len(each.dims) == 2 and _digest(onnx.numpy_helper.to_array(each, str(path.parent))) in wanted
    }
    nodes = [node.name for node in graph.node if node.op_type in _OPERATORS and ours.intersection(node.input)]
    (given,) = (each.name for each in graph.input)
    del graph
    if not nodes:
        raise MctfError("the file holds no linear layer of the blocks to quantize: export it in fp32")
    size = batch or _BATCH
    batches = iter([part for part in images.split(size) if len(part) == size] or [images[:1].expand(size, -1, -1, -1)])

    class Reader(CalibrationDataReader):
        """Calibration images, one batch at a time."""

        def get_next(self) -> dict[str, np.ndarray] | None:
            part = next(batches, None)
            return None if part is None else {given: part.contiguous().numpy()}

    written = path.with_name(f"int8.{path.name}")
    with quiet():
        quantize_static(
            str(path),
            str(written),
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_quantize=nodes,
            op_types_to_quantize=_OPERATORS,
            use_external_data_format=external,
            # outputs stay float32: rounding them once more doubles the KL and saves no time
            extra_options={"OpTypesToExcludeOutputQuantization": _OPERATORS},
        )
    if not external:
        os.replace(written, path)
        return
    whole: Any = onnx.load(str(written))
    for part in path.parent.iterdir():
        part.unlink()
    onnx.save(whole, str(path), save_as_external_data=True, location=f"{path.name}.data")


def quantize_torch(model: nn.Module) -> nn.Module:
    """The model in int8 without the weights that it no longer reads, in place: for a graph in a file."""
    quantize(model, "int8")
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    return model


def int8_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers that are quantized; raises MctfError where there are none."""
    layers = [layer for layer in linear_layers(model).values() if type(layer) is nn.Linear]
    if not layers:
        raise MctfError("the blocks have no linear layer that can be int8: export the model in fp32")
    return layers


def _digest(weight: Tensor | np.ndarray) -> bytes:
    array = np.ascontiguousarray(weight.detach().cpu().float().numpy() if isinstance(weight, Tensor) else weight)
    return hashlib.blake2b(array.tobytes() + repr(array.shape).encode(), digest_size=16).digest()
