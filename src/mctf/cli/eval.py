"""`mctf eval`: accuracy, fidelity and speed over several r, all measured in one run."""

import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import MctfError
from .options import (
    DTYPES,
    blocks_option,
    image_size_option,
    json_option,
    parse_blocks,
    parse_image_size,
    parse_reductions,
)
from .progress import progress as progress_bar
from .progress import ticking
from .writing import check_writable, write_text

if TYPE_CHECKING:
    from torch import device as Device

    from ..analysis.evaluate import Setting

_FILE = click.Path(path_type=Path)
_MOST_WORKERS = 8


@click.command(
    "eval",
    epilog="""\b
Examples:
  mctf eval deit_small_patch16_224 --data imagenet/val
  mctf eval deit_small_patch16_224 --data photos.zip -r 8,16,fast --limit 500
  mctf eval deit_tiny_patch16_224 --data val.zip --weights tiny.safetensors \\
      --classes classes.tsv -r 0,16 --method mctf,tome --json
  torchrun --nproc-per-node 8 -m mctf eval deit_base_patch16_224 --data imagenet/val
""",
)
@click.argument("model")
@click.option("--data", required=True, type=_FILE, help="Folder or zip file of class/name images.")
@click.option("--weights", type=_FILE, help="Weights file; timm's pretrained weights by default.")
@click.option("--classes", type=_FILE, help="TSV of index, class folder and name.")
@click.option("-r", "reductions", default="0,4,8,12,16,20", show_default=True, help="Tokens to fuse a block.")
@click.option("--method", "-m", "methods", default="mctf", show_default=True, help="Methods, as in mctf,tome.")
@blocks_option
@image_size_option
@click.option("--crop-pct", type=click.FloatRange(0.1, 1), help="Share of the shorter side in the crop.")
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True)
@click.option("--limit", type=click.IntRange(1), help="Use only so many images, evenly spaced.")
@click.option("--workers", type=click.IntRange(0), help="Processes that read images; none on the CPU by default.")
@click.option("--device", "device_name", help="As torch names it; a GPU where there is one by default.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--threads", type=click.IntRange(1), help="CPU threads; torch's choice by default.")
@click.option("--progress/--no-progress", default=None, help="Progress bar on stderr; on a terminal by default.")
@click.option("--output", type=_FILE, help="Write the JSON object into this file as well.")
@json_option
def command(output: Path | None, as_json: bool, **options: Any) -> None:
    """Top-1, top-5, fidelity to the unfused model, images/s and GFLOPs of MODEL: a timm name, or hf:NAME.

    Agreement, KL and class-token cosine compare with the unfused model and need no labels. Mean, std, crop and
    interpolation are the model's own. Every batch runs through all settings in turn. Under torchrun the processes
    share the images, each of which counts once.
    """
    if output is not None:
        check_writable(output)
    facts, rows = _evaluate(**options)
    if facts is None:  # another process speaks for all
        return
    text = json.dumps(facts | {"rows": [asdict(row) for row in rows]}, indent=2)
    if output is not None:
        write_text(output, text + "\n")
    if as_json:
        click.echo(text)
        return
    from .tables import print_rows

    title = f"{facts['model']} on {facts['images']} images of {facts['data']}, {facts['device']}, {facts['dtype']}"
    print_rows(rows, title=title, notes=facts["notes"])


def _evaluate(
    *,
    model: str,
    data: Path,
    weights: Path | None,
    classes: Path | None,
    reductions: str,
    methods: str,
    blocks: str | None,
    image_size: str | None,
    crop_pct: float | None,
    batch_size: int,
    limit: int | None,
    workers: int | None,
    device_name: str | None,
    dtype: str,
    threads: int | None,
    progress: bool | None,
) -> tuple[dict[str, Any] | None, tuple[Any, ...]]:
    """What the JSON object says beside its rows, and the rows; None for it in all processes but the first."""
    settings = _settings(methods, reductions, parse_blocks(blocks))
    size = parse_image_size(image_size)

    import torch

    from ..analysis.environment import describe_device, pick_device, versions
    from ..analysis.evaluate import evaluate
    from ..data import Batches, Preprocessing, find_images, find_labels
    from ..data.shares import share
    from ..models.loading import load_model
    from ..processes import joined

    if threads is not None:
        torch.set_num_threads(threads)
    images = find_images(data)
    images = images if limit is None else images.spaced(limit)
    with joined(pick_device(device_name)) as processes:
        device = processes.device
        loaded: Any = load_model(model, weights=weights, image_size=size).to(device, getattr(torch, dtype))
        labels = find_labels(images, num_classes=loaded.num_classes, table=classes)
        preprocessing = Preprocessing.of(loaded, crop_pct=crop_pct)
        batches = Batches(
            *share(images, labels, processes),
            preprocessing.transform(),
            batch_size=batch_size,
            workers=_workers(workers, device),
        )
        try:
            with progress_bar("batches", len(batches), wanted=progress if processes.first else False) as tick:
                result = evaluate(loaded, ticking(batches, tick), settings)
        except torch.OutOfMemoryError:
            raise MctfError(f"{device} has too little memory for batches of {batch_size}: lower --batch-size") from None
    if not processes.first:
        return None, ()
    facts = {
        "model": model,
        "weights": None if weights is None else str(weights),
        "data": str(data),
        "images": result.images,
        "preprocessing": asdict(preprocessing),
        "device": describe_device(device),
        "processes": processes.world,
        "dtype": dtype,
        "batch_size": batch_size,
        "versions": versions(),
        "command": shlex.join(["mctf", *sys.argv[1:]]),
        "notes": [*labels.notes, *result.notes],
    }
    return facts, result.rows


def _settings(methods: str, reductions: str, blocks: tuple[int, ...] | None) -> list["Setting"]:
    """Every method with every r, each pair once."""
    from ..analysis.evaluate import Setting

    names = [name.strip() for name in methods.split(",") if name.strip()]
    amounts = parse_reductions(reductions)
    if not names or not amounts:
        raise MctfError("there is nothing to evaluate: name at least one r (-r 16) and one method (--method mctf)")
    return list(dict.fromkeys(Setting(name, r, blocks) for name in names for r in amounts))


def _workers(asked: int | None, device: "Device") -> int:
    """Beside a GPU all cores but one read images; beside a CPU that computes they would spoil its timing."""
    if asked is not None:
        return asked
    return 0 if device.type == "cpu" else min(_MOST_WORKERS, max(0, (os.cpu_count() or 1) - 1))
