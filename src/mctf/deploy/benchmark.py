"""Speed, size and fidelity of one model in several formats, unfused and fused, all timed in one run on the CPU.

A speed-up compares with the unfused model in the same format, or with the first contender where there is none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..core.schedule import ReductionSpec
from ..data import Preprocessing
from ..errors import MctfError
from ..evaluation.fidelity import kl_divergence
from ..evaluation.timing import time_interleaved, why_inconclusive
from .export import export
from .exported import ExportedModel, load_exported
from .metadata import ExportMetadata
from .parity import generated_images, run_batches

TORCH = "torch"  # eager PyTorch, beside the formats of files


@dataclass(frozen=True)
class Contender:
    """A model to time. run: images (B 3 H W) to outputs (B K). bytes: of its files, or of its weights in PyTorch."""

    label: str
    format: str
    run: Callable[[Tensor], Tensor]
    metadata: ExportMetadata
    bytes: int

    @classmethod
    def of_file(cls, model: ExportedModel) -> "Contender":
        facts = model.metadata
        files = [model.path, *(model.path.with_suffix(suffix) for suffix in (".bin",)), Path(f"{model.path}.data")]
        size = sum(file.stat().st_size for file in files if file.is_file())
        return cls(model.path.name, facts.format, model, facts, size)

    @classmethod
    def of_model(cls, model: nn.Module, name: str, format: str, *, folder: Path, label: str) -> "Contender":
        """A model in PyTorch, or exported into a folder. It is checked as `mctf.export` does."""
        if format == TORCH:
            weights = sum(value.nbytes for value in model.state_dict().values())
            metadata = ExportMetadata.of(model, format=TORCH, dtype="float32", batch=None, name=name)
            return cls(f"{label}, {format}", format, model.eval(), metadata, weights)
        from .formats import find_format

        folder.mkdir(parents=True)
        report = export(model, folder / f"model{find_format(format).suffix}", format, name=name)
        return cls(f"{label}, {format}", format, load_exported(report.path), report.metadata, report.bytes)


@dataclass(frozen=True)
class FormatMeasurement:
    """One contender at one batch size: medians over rounds, spread as a share of the median.

    kl, agreement: to the first contender, on generated images; None for embeddings, and for the first itself.
    """

    name: str
    format: str
    method: str | None
    r: ReductionSpec | None
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
        if each.metadata.preprocessing.image_size != first.preprocessing.image_size:
            raise MctfError(f"{each.label} takes images of another size than {contenders[0].label}: time them apart")
    images = sample(first.preprocessing, batch)
    with torch.inference_mode():
        outputs = [run_batches(each.run, images, batch) for each in contenders]
    passes = {str(index): partial(each.run, images[:batch]) for index, each in enumerate(contenders)}
    timings = list(time_interleaved(passes, device=torch.device("cpu"), rounds=rounds, after_round=tick).values())
    results = []
    for each, output, timing in zip(contenders, outputs, timings, strict=True):
        unfused = [
            other
            for candidate, other in zip(contenders, timings, strict=True)
            if candidate.format == each.format and candidate.metadata.method is None
        ]
        classifies = first.output == "logits" and each is not contenders[0] and output.shape == outputs[0].shape
        results.append(
            FormatMeasurement(
                name=each.label,
                format=each.format,
                method=each.metadata.method,
                r=each.metadata.r,
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


def sample(preprocessing: Preprocessing, batch: int, least: int = 16) -> Tensor:
    """Generated images: whole batches, `least` images or more."""
    count = -(-max(least, batch) // batch) * batch
    images = generated_images(preprocessing, min(count, 64))
    return images.repeat(-(-count // len(images)), 1, 1, 1)[:count]


def verdict(results: Sequence[FormatMeasurement]) -> list[str]:
    """A line where the timings are those of a busy machine."""
    busy = why_inconclusive(spread=max(each.spread for each in results), upper_bound=None)
    return [] if busy is None else [busy]
