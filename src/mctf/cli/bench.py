"""`mctf bench`: speed of unfused, fused and free-drop models, all timed in one run."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import MctfError, did_you_mean, is_out_of_memory
from .options import (
    FILE,
    NAMES,
    REDUCTIONS,
    Parsed,
    blocks_option,
    budgets_option,
    calibration_option,
    device_option,
    dtype_option,
    image_size_option,
    json_option,
    output_option,
    quantized_precisions,
    schedule_option,
    threads_option,
    trim_last_option,
)
from .output import check_outputs, give_json
from .progress import Command, progress

if TYPE_CHECKING:
    from ..core.schedule import ReductionSpec
    from ..deploy.benchmark import Contender
    from ..evaluation.benchmark import Measurement
    from ..evaluation.contenders import BenchmarkConfig

_LARGEST_BATCH = 10**9


def parse_batches(text: str) -> list[int]:
    """Positive whole numbers between commas."""
    try:
        batches = [int(part) for part in text.split(",")]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1 or max(batches) > _LARGEST_BATCH:
        raise MctfError(f"--batch {text!r} is not a list of positive numbers: write 1,8,64")
    return batches


@click.command(
    "bench",
    cls=Command,
    epilog="""\b
Examples:
  mctf bench deit_small_patch16_224
  mctf bench deit_small_patch16_224 deit_base_patch16_224 \\
      -r 16,fast --batch 256 --dtype bfloat16 --compile
  mctf bench deit_base_patch16_384 -r fast --batch 1 --dtype bfloat16 \\
      --compile --mode reduce-overhead
  mctf bench deit_small_patch16_224 --batch 256 --dtype bfloat16 \\
      --compile --training
  mctf bench deit_small_patch16_224 --format torch,onnx,openvino \\
      --method ward --flops 0.56 --batch 1,8
  mctf bench deit_small_patch16_224 --format torch,onnx,openvino \\
      --precision fp32,int8 --method ward --flops 0.56 --batch 1,8
  mctf bench vit_large_patch16_224 -m ward --flops 0.56 --batch 128 \\
      --dtype bfloat16 --compile --precision bf16,fp8
  mctf bench deit_small.onnx deit_small_ward.onnx --batch 1,8
""",
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL…")
@click.option("-r", "reductions", type=REDUCTIONS, help="Tokens to fuse per block: 16,0.35,fast; 16 by default.")
@budgets_option
@schedule_option
@blocks_option
@click.option("--method", "-m", "methods", type=NAMES, help="Methods to time; mctf,mctf_exact,tome by default.")
@click.option(
    "--batch",
    "batches",
    type=Parsed("n,…", parse_batches),
    default="8",
    show_default=True,
    help="Batch sizes, as in 1,8,64.",
)
@trim_last_option
@image_size_option
@dtype_option
@click.option("--compile", "compiled", is_flag=True, help="Compile every contender with torch.compile.")
@click.option("--training", is_flag=True, help="Time forward and backward; --dtype is that of autocast.")
@click.option("--mode", default="default", show_default=True, help="Mode of torch.compile: reduce-overhead, …")
@click.option(
    "--format",
    "formats",
    type=NAMES,
    help="On the CPU, unfused and fused, in these formats: torch,onnx,openvino,aoti,pt2.",
)
@click.option(
    "--precision",
    "precisions",
    type=NAMES,
    help="Also quantized: bf16,fp8 on a GPU, fp32,int8 on a CPU and with --format.",
)
@calibration_option
@click.option("--weights", type=FILE, help="Weights file, for the KL of --format; random weights by default.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Timings per contender.")
@click.option("--no-bounds", is_flag=True, help="Baseline and methods alone: up to three fewer models to compile.")
@device_option
@threads_option
@output_option
@json_option
def command(
    models: tuple[str, ...],
    reductions: list["ReductionSpec"] | None,
    budgets: list[float] | None,
    schedule: Path | None,
    blocks: tuple[int, ...] | None,
    methods: list[str] | None,
    batches: list[int],
    trim_last: bool | None,
    image_size: tuple[int, int] | None,
    dtype: str,
    compiled: bool,
    training: bool,
    mode: str,
    formats: list[str] | None,
    precisions: list[str] | None,
    calibration: str | None,
    weights: Path | None,
    rounds: int,
    no_bounds: bool,
    device_name: str | None,
    threads: int | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Images/s of MODEL… (timm names, hf:NAME, or files of mctf export), unfused and fused.

    Contenders: the unfused model (baseline), each method, and the free-drop upper bound, which drops as many tokens at
    no cost. On a GPU in reduced precision fused models embed patches by a matrix product; there the unfused model with
    that product is a second baseline. Weights are random, as speed does not depend on them. Every fused model is first
    checked against reference operations in float32. Contenders are timed in turn in every round. Figures are medians
    over rounds; a speed-up is the median of the ratios within rounds.

    Exported files are timed against each other. --format exports the unfused and the fused models first.

    --precision also times baseline and methods quantized (mctf.quantize); speed-ups are over the unquantized baseline.
    """
    check_outputs(output, inputs=(schedule, weights))
    if reductions is not None and budgets is not None:
        raise MctfError("-r and --flops both say how much to fuse: give one of them")
    if mode != "default" and not compiled:
        raise MctfError(f"--mode {mode} belongs to torch.compile: add --compile")

    import torch

    from ..deploy.exported import is_exported

    files = [is_exported(name) for name in models]
    if any(files) or formats is not None:
        if training or compiled or no_bounds or dtype != "float32" or device_name not in (None, "cpu"):
            raise MctfError("exported models run on the CPU: leave out --training, --compile, --no-bounds, --dtype, …")
        if any(files) and not (
            all(files) and not any((reductions, budgets, schedule, blocks, methods, formats, weights, precisions))
        ):
            raise MctfError(
                "exported files are timed as they are: give files alone, without -r, --method, --format or --precision"
            )
        given: list[dict[str, Any]] = [{"r": r} for r in reductions or ()]
        given += [{"flops": budget} for budget in budgets or ()]
        given += [] if schedule is None else [{"schedule": schedule}]
        if blocks is not None:
            given = [amount | {"blocks": blocks} for amount in given or [{}]]
        quantized = quantized_precisions(precisions, dtype)
        if "fp8" in quantized:
            raise MctfError("--format times models on the CPU, where fp8 is no faster: choose --precision fp32,int8")
        if calibration is not None and not quantized:
            raise MctfError("--calibration is for models in int8: add --precision fp32,int8")
        contenders = _exported(
            models,
            formats,
            methods,
            given,
            weights=weights,
            image_size=image_size,
            precisions=[each for each in ("fp32", *quantized) if precisions is None or each in precisions],
            calibration=calibration,
        )
        _bench_formats(contenders, batches, rounds=rounds, threads=threads, output=output, as_json=as_json)
        return
    quantized = quantized_precisions(precisions, dtype)
    if weights is not None or calibration is not None:
        raise MctfError("--weights and --calibration are for --format: speed does not depend on weights or images")

    from ..evaluation.benchmark import inconclusive, verdicts
    from ..evaluation.contenders import BenchmarkConfig
    from ..evaluation.environment import command_line, commit, describe_device, pick_device, set_threads, versions
    from ..hosts import find_host
    from ..models.loading import create, create_empty
    from ..planning import FusionRequest
    from ..schedule_file import read_schedule

    saved = None if schedule is None else read_schedule(schedule)
    amounts: list[dict[str, Any]] = [{"r": r} for r in reductions or (16,)]
    if budgets is not None:
        amounts = [{"r": None, "flops": budget} for budget in budgets]
    if saved is not None:
        if reductions or budgets or methods:
            raise MctfError(
                "a schedule says what each block fuses, and by which method: leave out -r, --flops and --method"
            )
        methods, amounts = [saved.method], [{"r": None, "schedule": saved}]
    methods = ["mctf", "mctf_exact", "tome"] if methods is None else methods
    if not methods:
        raise MctfError("there is nothing to time: name at least one method (--method mctf)")
    requests = [
        FusionRequest.of(
            None if saved else name, blocks=blocks, options={}, **{"flops": None, "schedule": None} | amount
        )
        for name, amount in product(methods, amounts)
    ]
    for name in models:  # refused before the first of them is timed
        host = find_host(create_empty(name, image_size=image_size))
        for request in requests:
            request.resolve(host, trim_last=trim_last)
    set_threads(threads)
    device, precision = pick_device(device_name), getattr(torch, dtype)
    tables: list[dict[str, Any]] = []
    for name in models:
        model: Any = create(name, image_size=image_size).to(device, torch.float32 if training else precision)
        size = image_size or find_host(model).image_size
        for amount, batch in product(amounts, batches):
            config = BenchmarkConfig(
                methods=tuple(methods),
                batch=batch,
                image_size=size,
                compiled=mode if compiled else None,
                bounds=not no_bounds,
                rounds=rounds,
                training=precision if training else None,
                blocks=blocks,
                trim_last=trim_last,
                precisions=tuple(quantized),
                **amount,
            )
            where = describe_device(next(model.parameters()).device)
            title = f"{name}, {config.amount}, batch {batch}, {size[0]}x{size[1]}, {where}, {dtype}"
            title += ", forward and backward" * training
            title += "" if trim_last is None else f", {'' if trim_last else 'no '}trimmed last block"
            rows = _run(model, config, title)
            tables.append(
                {"title": title, "rows": rows, "conclusive": inconclusive(rows) is None, "notes": verdicts(rows)}
            )
    facts = {
        "command": command_line(),
        "device": describe_device(device),
        "dtype": dtype,
        "compiled": mode if compiled else None,
        "training": training,
        "rounds": rounds,
        "versions": versions(),
        "commit": commit(),
        "tables": [table | {"rows": [asdict(row) for row in table["rows"]]} for table in tables],
    }
    give_json(facts, file=output, as_json=as_json)
    if not as_json:
        from .tables import print_benchmark

        for table in tables:
            print_benchmark(table["rows"], title=table["title"], notes=table["notes"])


@contextmanager
def _exported(
    models: Sequence[str],
    formats: Sequence[str] | None,
    methods: Sequence[str] | None,
    amounts: Sequence[dict[str, Any]],
    *,
    weights: Path | None,
    image_size: tuple[int, int] | None,
    precisions: Sequence[str],
    calibration: str | None,
) -> "Iterator[tuple[list[Contender], list[str]]]":
    """Exported files as contenders, or one model in several formats and precisions, unfused and fused.

    Beside them a line for each combination that cannot be timed, with the reason.
    """
    from ..deploy.benchmark import TORCH, Contender
    from ..deploy.exported import load_exported
    from ..deploy.formats import FORMATS

    if formats is None:
        yield [Contender.of_file(load_exported(name)) for name in models], []
        return
    if not formats:
        raise MctfError("--format is empty: write torch,onnx")
    for each in formats:
        if each not in (TORCH, *FORMATS):
            raise MctfError(f"format {each!r} is unknown: {did_you_mean(each, (TORCH, *FORMATS))}")
        if each != TORCH:
            FORMATS[each].check_packages()
    if len(models) > 1:
        raise MctfError("--format takes one model: time them one by one")

    import torch

    from ..api import fuse
    from ..data import Preprocessing, open_dataset
    from ..evaluation.setup import CALIBRATION_IMAGES
    from ..models.loading import copy_sharing_weights, load_described

    (name,) = models
    source = None if calibration is None else open_dataset(calibration)
    model, _ = load_described(name, weights=weights, random=weights is None, image_size=image_size)
    variants = {"unfused": model.eval()}
    images = None
    if source is not None:
        chosen, transform = source.spaced(CALIBRATION_IMAGES), Preprocessing.of(model).transform()
        images = torch.stack([transform(image) for _, image in chosen.readable(skip=False)])
    names = [None] if any("schedule" in amount for amount in amounts) else methods or ["ward"]
    for method in names:
        for amount in amounts or [{}]:
            label = ", ".join([method or "schedule", *(f"{key}={value}" for key, value in amount.items())])
            variants[label] = fuse(copy_sharing_weights(model), method, **amount)
    with tempfile.TemporaryDirectory() as folder:
        contenders, left_out = list[Contender](), list[str]()
        combinations = list(product(formats, variants, precisions))
        with progress("exporting", total=len(combinations)) as tick:
            for number, (each, label, precision) in enumerate(combinations, start=1):
                path = Path(folder) / str(number)
                try:
                    contender = Contender.of_model(
                        variants[label], name, each, folder=path, label=label, precision=precision, calibration=images
                    )
                    contenders.append(contender)
                except MctfError as failure:  # the others are timed all the same
                    if not contenders and number == len(combinations):
                        raise
                    left_out.append(f"{label}, {each}, {precision} is left out: {failure}")
                tick()
        yield contenders, left_out


def _bench_formats(
    opened: "AbstractContextManager[tuple[list[Contender], list[str]]]",
    batches: Sequence[int],
    *,
    rounds: int,
    threads: int | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Time exported contenders at every batch size and print the tables."""
    from ..deploy.benchmark import benchmark_formats, verdict
    from ..evaluation.environment import command_line, commit, describe_device, set_threads, versions

    set_threads(threads)
    tables: list[dict[str, Any]] = []
    with opened as (contenders, left_out):
        import torch

        where = describe_device(torch.device("cpu"))
        packages = sorted({package for each in contenders for package in each.packages})
        for batch in batches:
            title = f"{contenders[0].metadata.model}, batch {batch}, {where}, float32"
            with progress(title, total=rounds + 2) as tick:
                rows = benchmark_formats(contenders, batch=batch, rounds=rounds, tick=tick)
            tables.append({"title": title, "rows": rows, "notes": [*left_out, *verdict(rows)]})
    facts = {
        "command": command_line(),
        "device": where,
        "rounds": rounds,
        "versions": versions(*packages),
        "commit": commit(),
        "tables": [table | {"rows": [asdict(row) for row in table["rows"]]} for table in tables],
    }
    give_json(facts, file=output, as_json=as_json)
    if not as_json:
        from .tables import print_formats

        for table in tables:
            print_formats(table["rows"], title=table["title"], notes=table["notes"])


def _run(model: Any, config: "BenchmarkConfig", title: str) -> tuple["Measurement", ...]:
    from ..evaluation.benchmark import benchmark

    steps = config.rounds + 4 + len(config.methods) + len(config.precisions) * (len(config.methods) + 1)  # at most
    with progress(title, total=steps) as tick:
        try:
            return benchmark(model, config, tick=tick)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise MctfError(f"too little memory for a batch of {config.batch}: lower --batch") from None
