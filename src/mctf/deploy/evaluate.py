"""Accuracy and throughput of an exported file on images, for `mctf eval`."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._utils import plural
from ..data import EvalLoader, open_dataset
from ..errors import MctfError
from ..evaluation.environment import command_line, describe_device, set_threads, versions
from ..evaluation.evaluate import Row
from ..evaluation.fidelity import Output, average, concatenate, score
from ..evaluation.setup import RunOptions
from ..evaluation.timing import ThroughputMeter
from .exported import load_exported
from .formats import find_format


def evaluate_exported(options: RunOptions, *, tick: Callable[[], object] = lambda: None) -> tuple[Row, dict[str, Any]]:
    """The row of an exported file, and the facts of the run. Fidelity is unknown: the file has no unfused model."""
    if options.weights is not None or options.image_size is not None or options.dtype != "float32":
        raise MctfError(f"{options.model} holds its weights and sizes: omit --weights, --image-size and --dtype")
    if options.device_name not in (None, "cpu"):
        raise MctfError(f"exported files run on the CPU: leave out --device {options.device_name}")
    set_threads(options.threads)
    model = load_exported(options.model, threads=options.threads)
    facts, device, preprocessing = model.metadata, torch.device("cpu"), model.metadata.preprocessing
    if preprocessing is None:
        raise MctfError(
            f"{options.model} does not say how its images are prepared: export the model again by "
            "mctf.export(…, preprocessing=mctf.data.Preprocessing(…))"
        )
    if options.crop_pct is not None:
        preprocessing = replace(preprocessing, crop_pct=options.crop_pct)
    dataset = open_dataset(options.data, limits=options.limits)
    dataset = dataset.for_model(len(facts.class_names), classes=options.classes)
    dataset = dataset.spaced(options.limit or len(dataset))
    batches = EvalLoader(
        dataset,
        preprocessing.transform(),
        batch_size=facts.batch or options.batch_size,
        workers=options.workers,
        device=device,
        on_corrupt=options.on_corrupt,
    )
    scores, throughput = [], ThroughputMeter()
    for batch in batches:
        pixels, images = batch.pixels, len(batch.pixels)
        if facts.batch is not None and images < facts.batch:  # the last one
            pixels = torch.cat([pixels, pixels[-1:].expand(facts.batch - images, -1, -1, -1)])
        outputs: Tensor = throughput.run(partial(model, pixels), images=images, device=device)[:images]
        output = Output(outputs, outputs)
        scores.append(score(output, output, batch.labels, classifies=facts.output == "logits"))
        tick()
    if not scores:
        raise MctfError("there are no images to evaluate: give at least one")
    whole = concatenate(scores)
    figures = asdict(average(whole)) | {"agreement": None, "kl": None, "class_cosine": None}
    row = Row(
        r=0 if facts.r is None else facts.r,
        method=f"{facts.method or 'unfused'} ({facts.format})",
        **figures,
        kl_error=None,
        gflops=facts.gflops,
        images_per_second=throughput.images_per_second,
    )
    images = len(whole.class_cosine)
    notes = [*dataset.notes, "an exported file is one setting: agreement and KL to the unfused model are unknown"]
    if images < len(dataset):
        notes.append(f"{plural(len(dataset) - images, 'unreadable image')} skipped")
    return row, {
        "model": options.model,
        "data": str(options.data),
        "images": images,
        "skipped": len(dataset) - images,
        "preprocessing": asdict(preprocessing),
        "device": describe_device(device),
        "dtype": facts.dtype,
        "batch_size": facts.batch or options.batch_size,
        "versions": versions(*find_format(facts.format).packages),
        "command": command_line(),
        "notes": notes,
        "rows": [asdict(row)],
    }
