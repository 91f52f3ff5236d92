"""Speed, size and fidelity of one model in several formats and precisions, unfused and fused, in one run on the CPU.

A speed-up compares with the unfused model in the same format in float32, or with the first contender where there is
none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..core.schedule import ReductionSpec
from ..errors import MctfError
from ..evaluation.fidelity import kl_divergence
from ..evaluation.timing import time_interleaved, why_inconclusive
from ..kernels.quantized_linear import QuantizedLinear
from ..models.loading import copy_sharing_weights
from ..quantization import quantize
from .export import export
from .exported import ExportedModel, load_exported
from .formats import find_format
from .metadata import ExportMetadata
from .parity import generated_images, run_batches

FP32 = "fp32"
TORCH = "torch"  # eager PyTorch, beside the formats of files


@dataclass(frozen=True)
class Contender:
    """A model to time. run: images (B 3 H W) to outputs (B K). bytes: of its files, or of its weights in PyTorch."""

    label: str
    format: str
    run: Callable[[Tensor], Tensor]
    metadata: ExportMetadata
    bytes: int

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages beside torch that write and run it."""
        return () if self.format == TORCH else find_format(self.format).packages

    @classmethod
    def of_file(cls, model: ExportedModel) -> "Contender":
        facts = model.metadata
        files = {*find_format(facts.format).files(model.path), Path(f"{model.path}.data")}
        size = sum(file.stat().st_size for file in files if file.is_file())
        return cls(model.path.name, facts.format, model, facts, size)

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        name: str,
        format: str,
        *,
        folder: Path,
        label: str,
        precision: str = FP32,
        calibration: Tensor | None = None,
    ) -> "Contender":
        """A model in PyTorch, or exported into a folder. It is checked as `mctf.export` does.

        calibration: for formats that need images in int8; generated ones by default.
        """
        label = f"{label}, {format}" + ("" if precision == FP32 else f", {precision}")
        if format == TORCH:
            metadata = ExportMetadata.of(
                model, format=TORCH, dtype="float32", batch=None, name=name, precision=precision
            )
            if precision != FP32:
                model = quantize(copy_sharing_weights(model), precision)
            return cls(label, format, model.eval(), metadata, weight_bytes(model))
        folder.mkdir(parents=True)
        if calibration is None:
            calibration = generated_images(ExportMetadata.of(model, format=format, dtype="float32", batch=None))
        path = folder / f"model{find_format(format).suffix}"
        report = export(model, path, format, name=name, precision=precision, calibration=calibration)
        return cls(label, format, load_exported(report.path), report.metadata, report.bytes)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that a model reads: of a quantized layer, the quantized ones."""
    total = sum(value.nbytes for value in model.state_dict().values())
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    return total + sum(each.quantized.nbytes + each.weight_scale.nbytes - each.weight.nbytes for each in layers)


@dataclass(frozen=True)
class FormatMeasurement:
    """One contender at one batch size: medians over rounds, spread as a share of the median.

    kl, agreement: to the first contender, on generated images; None for embeddings, and for the first itself.
    """

    name: str
    format: str
    method: str | None
    r: ReductionSpec | None
    precision: str
    batch: int
    milliseconds: float
    spread: float
    images_per_second: float
    speedup: float
    gflops: float
    bytes: int
    kl: float | None
    agreement: float | None


def benchmark_formats(
    contenders: Sequence[Contender], *, batch: int, rounds: int = 7, tick: Callable[[], object] = lambda: None
) -> tuple[FormatMeasurement, ...]:
    """Time all contenders at one batch size, in turn in every round; `tick` is called after every round."""
    first = contenders[0].metadata
    for each in contenders:
        if each.metadata.batch not in (None, batch):
            raise MctfError(
                f"{each.label} takes batches of {each.metadata.batch} alone: give --batch {each.metadata.batch}"
            )
        if each.metadata.image_size != first.image_size:
            raise MctfError(f"{each.label} takes images of another size than {contenders[0].label}: time them apart")
    images = sample(first, batch)
    with torch.inference_mode():
        outputs = [run_batches(each.run, images, batch) for each in contenders]
    passes = {str(index): partial(each.run, images[:batch]) for index, each in enumerate(contenders)}
    timings = list(time_interleaved(passes, device=torch.device("cpu"), rounds=rounds, after_round=tick).values())
    results = []
    for each, output, timing in zip(contenders, outputs, timings, strict=True):
        unfused = [
            other
            for candidate, other in zip(contenders, timings, strict=True)
            if candidate.format == each.format
            and candidate.metadata.method is None
            and candidate.metadata.precision == FP32
        ]
        classifies = first.output == "logits" and each is not contenders[0] and output.shape == outputs[0].shape
        results.append(
            FormatMeasurement(
                name=each.label,
                format=each.format,
                method=each.metadata.method,
                r=each.metadata.r,
                precision=each.metadata.precision,
                batch=batch,
                milliseconds=timing.median * 1e3,
                spread=timing.spread,
                images_per_second=batch / timing.median,
                speedup=timing.speedup_over((unfused or timings)[0]),
                gflops=each.metadata.gflops,
                bytes=each.bytes,
                kl=kl_divergence(outputs[0].double(), output.double()).mean().item() if classifies else None,
                agreement=100 * (output.argmax(1) == outputs[0].argmax(1)).double().mean().item()
                if classifies
                else None,
            )
        )
    return tuple(results)


def sample(metadata: ExportMetadata, batch: int, least: int = 16) -> Tensor:
    """Generated images: whole batches, `least` images or more."""
    count = -(-max(least, batch) // batch) * batch
    images = generated_images(metadata, min(count, 64))
    return images.repeat(-(-count // len(images)), 1, 1, 1)[:count]


def verdict(results: Sequence[FormatMeasurement]) -> list[str]:
    """What int8 gains over float32 in the same format and fusion; one line where the machine is busy."""
    busy = why_inconclusive(spread=max(each.spread for each in results), upper_bound=None)
    if busy is not None:
        return [busy]
    lines = []
    for each in results:
        other = next((one for one in results if _differ_in_precision(one, each)), None)
        if other is None:
            continue
        gain = other.milliseconds / each.milliseconds
        what = f"{gain:.2f}x the speed of {other.name}"
        lines.append(f"{each.name}: {what}" if gain > 1 else f"{each.name} does not pay here: {what}")
    return lines


def _differ_in_precision(one: FormatMeasurement, other: FormatMeasurement) -> bool:
    """Whether one is the other in float32."""
    same = (one.format, one.method, one.r) == (other.format, other.method, other.r)
    return same and one.precision == FP32 != other.precision
