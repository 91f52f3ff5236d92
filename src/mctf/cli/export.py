"""`mctf export`: a fused model as a file for another runtime, checked against the model."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._utils import plural
from ..errors import MctfError
from .options import (
    FILE,
    amount_options,
    blocks_option,
    calibration_option,
    dtype_option,
    image_size_option,
    json_option,
    limits_options,
    options_option,
    parse_options,
    progress_option,
    threads_option,
    weights_option,
)
from .output import check_outputs, echo, give_json
from .progress import Command, progress

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core.schedule import ReductionSpec
    from ..data import ImageDataset
    from ..deploy.export import ExportReport


@click.command(
    "export",
    cls=Command,
    epilog="""\b
Examples:
  mctf export deit_small_patch16_224 --method ward --flops 0.56 \\
      --output deit_small_ward.onnx
  mctf export deit_small_patch16_224 --method ward --flops 0.56 \\
      --format openvino --output deit_small_ward.xml --data photos.zip
  mctf export deit_small_patch16_224 -r 0 --output deit_small.onnx
  mctf export deit_small_patch16_224 --method ward --flops 0.56 \\
      --precision int8 --calibration photos.zip --output deit_small.onnx
  mctf export hf:google/siglip-base-patch16-224 --method ward \\
      --format aoti --batch 1 --output tower.pt2
""",
)
@click.argument("model")
@click.option("--format", "format_name", help="onnx, openvino, aoti or pt2; by default what --output ends in.")
@click.option("--output", "target", type=FILE, required=True, help="The file to write: .onnx, .xml or .pt2.")
@amount_options(None)
@options_option
@blocks_option
@weights_option
@click.option("--random-weights", is_flag=True, help="Export without trained weights.")
@image_size_option
@click.option("--batch", type=click.IntRange(1, 4096), help="A fixed batch size; any batch by default.")
@dtype_option
@click.option("--precision", help="fp32, fp16, bf16 (as --dtype), or int8: the linear layers of the blocks.")
@calibration_option
@click.option("--data", help="Images to check the file on; generated ones by default.")
@click.option(
    "--images", "count", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Of --data at most."
)
@click.option("--check/--no-check", default=True, help="Run the file and compare it with the model; on by default.")
@limits_options
@threads_option
@progress_option
@json_option
def command(
    model: str,
    format_name: str | None,
    target: Path,
    r: "ReductionSpec | None",
    flops: float | None,
    schedule: Path | None,
    method: str | None,
    pairs: tuple[str, ...],
    blocks: tuple[int, ...] | None,
    weights: Path | None,
    random_weights: bool,
    image_size: tuple[int, int] | None,
    batch: int | None,
    dtype: str,
    precision: str | None,
    calibration: str | None,
    data: str | None,
    count: int,
    check: bool,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write MODEL (a timm name, or hf:NAME) for another runtime, fused; -r 0 for the unfused model.

    The file is then run on images at batch 1 and at a larger one, and compared with the model in PyTorch. Two nearly
    equal tokens may be chosen in another order wherever rounding differs, also between float32 and float64 in PyTorch:
    such images are flipped. Where the file flips more images than that, or the median image differs by more than
    rounding, the command fails and no file is left. In int8 it may differ by four times what int8 in PyTorch does.
    """
    inputs = (data, weights, schedule, calibration)
    check_outputs(target, inputs=inputs)

    from ..api import fuse
    from ..data import ReadLimits, open_dataset
    from ..deploy.export import check_precision, check_request, export, refuse_adaptive
    from ..evaluation.environment import set_threads
    from ..evaluation.setup import CALIBRATION_IMAGES
    from ..models.loading import load_described
    from ..planning import FusionRequest

    wanted = options.pop("progress")
    limits = ReadLimits.of(**options)
    if format_name is None:
        format_name = {".xml": "openvino", ".pt2": "pt2"}.get(target.suffix, "onnx")
    kind, _ = check_request(target, format_name)
    check_outputs(*kind.files(target), inputs=inputs)
    _, int8 = check_precision(precision, dtype)
    if int8 and "onnx" in kind.packages and calibration is None:
        raise MctfError(
            f"{kind.name} in int8 needs images that show the ranges of activations: add --calibration IMAGES"
        )
    if calibration is not None and not (int8 and "onnx" in kind.packages):
        raise MctfError("--calibration is for ONNX and OpenVINO files in int8: leave it out, or add --precision int8")
    own = parse_options(pairs)
    request = FusionRequest.of(method, r=r, flops=flops, blocks=blocks, schedule=schedule, options=own)
    if request.method.adaptive:
        refuse_adaptive(request.method)
    dataset = None if data is None else open_dataset(data, limits=limits).spaced(count)
    shown = None if calibration is None else open_dataset(calibration, limits=limits).spaced(CALIBRATION_IMAGES)
    set_threads(threads)
    with progress(f"loading {model}", wanted=wanted) as bar:
        loaded, _ = load_described(model, weights=weights, random=random_weights, image_size=image_size)
        if r != 0:
            fuse(loaded, method, r=r, flops=flops, blocks=blocks, schedule=schedule, **own)
        images = None if dataset is None else _images(loaded, dataset)
        report = export(
            loaded,
            target,
            format_name,
            batch=batch,
            dtype=dtype,
            precision=precision,
            calibration=None if shown is None else _images(loaded, shown),
            images=images,
            check=check,
            name=model,
            tick=bar.describe,
        )
    facts = {
        "path": str(report.path),
        "files": [str(file) for file in report.files],
        "bytes": report.bytes,
        "metadata": asdict(report.metadata),
        "parity": {str(size): asdict(each) for size, each in report.parity.items()},
        "control": None if report.control is None else asdict(report.control),
    }
    give_json(facts, file=None, as_json=as_json)
    if not as_json:
        _print(report)


def _images(model: "nn.Module", dataset: "ImageDataset") -> "Tensor":
    """All images of a dataset, preprocessed for the model."""
    import torch

    from ..data import Preprocessing

    transform = Preprocessing.of(model).transform()
    return torch.stack([transform(image) for _, image in dataset.readable(skip=False)])


def _print(report: "ExportReport") -> None:
    facts = report.metadata
    fusion = "unfused" if facts.method is None else f"{facts.method} r={facts.r}"
    cost = f"{facts.gflops:.2f} GFLOPs of {facts.gflops_base:.2f}"
    precision = "int8" if facts.precision == "int8" else facts.dtype
    batch = "any batch" if facts.batch is None else f"batch {facts.batch}"
    echo(f"{facts.model}, {fusion}, {cost}, {facts.format}, {precision}, {batch}")
    for file in report.files:
        echo(f"  {file}: {file.stat().st_size / 2**20:.1f} MiB")
    if report.control is None:
        echo("note: the file was not run; leave out --no-check to compare it with the model")
        return
    other = "float64" if precision == "float32" else precision
    echo(f"against the model in PyTorch, float32, on {plural(report.control.images, 'image')}:")
    for size, each in report.parity.items():
        echo(f"  file, batch {size}: {each}")
    echo(f"  PyTorch in {other}: {report.control}")
