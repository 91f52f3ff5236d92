"""`mctf bench`: plain, fused and free-drop models against the clock, in one run."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import MctfError
from .options import DTYPES, image_size_option, json_option, parse_image_size, parse_numbers, parse_reductions
from .progress import progress
from .writing import check_writable, write_text

if TYPE_CHECKING:
    from ..analysis.benchmark import Contest, Result


@click.command(
    "bench",
    epilog="""\b
Examples:
  mctf bench deit_small_patch16_224
  mctf bench deit_small_patch16_224 deit_base_patch16_224 -r 16,fast --batch 256 --dtype bfloat16 --compile
  mctf bench deit_base_patch16_384 -r fast --batch 1 --dtype bfloat16 --compile --mode reduce-overhead
  mctf bench deit_small_patch16_224 --batch 256 --dtype bfloat16 --compile --training
""",
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL…")
@click.option("-r", "reductions", default="16", show_default=True, help="Tokens to fuse a block: 16, 0.35 or fast.")
@click.option("--method", "-m", "methods", default="mctf,mctf_exact,tome", show_default=True, help="Methods to time.")
@click.option("--batch", "batches", default="8", show_default=True, help="Batch sizes, as in 1,8,64.")
@image_size_option
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--compile", "compiled", is_flag=True, help="Compile every contender with torch.compile.")
@click.option("--training", is_flag=True, help="Time forward and backward; --dtype is then that of autocast.")
@click.option("--mode", default="default", show_default=True, help="Mode of torch.compile, as reduce-overhead.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Timings of each contender.")
@click.option("--device", "device_name", help="As torch names it; a GPU where there is one by default.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; torch's choice by default.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the JSON object into this file as well.")
@json_option
def command(output: Path | None, as_json: bool, **options: Any) -> None:
    """Images per second of MODEL… (timm names, or hf:NAME): plain, fused by each method, tokens dropped for nothing.

    Weights are random: speed does not depend on them. Every fused model is first checked against plain operations
    in float32. Contenders are timed in turn, round after round; medians are given.
    """
    if output is not None:
        check_writable(output)
    facts, results = _benchmark(**options)
    text = json.dumps(facts, indent=2)
    if output is not None:
        write_text(output, text + "\n")
    if as_json:
        click.echo(text)
        return
    from .tables import print_benchmark

    for title, rows, lines in results:
        print_benchmark(rows, title=title, notes=lines)


def _benchmark(
    *,
    models: Sequence[str],
    reductions: str,
    methods: str,
    batches: str,
    image_size: str | None,
    dtype: str,
    compiled: bool,
    training: bool,
    mode: str,
    rounds: int,
    device_name: str | None,
    threads: int | None,
) -> tuple[dict[str, Any], list[tuple[str, tuple["Result", ...], list[str]]]]:
    """The JSON object, and a title, results and remarks for every table."""
    import torch

    from ..analysis.benchmark import Contest, verdicts
    from ..analysis.environment import commit, describe_device, pick_device, versions
    from ..hosts import find_host
    from ..models.loading import create

    if threads is not None:
        torch.set_num_threads(threads)
    device = pick_device(device_name)
    precision = getattr(torch, dtype)
    size = parse_image_size(image_size)
    names = tuple(name.strip() for name in methods.split(",") if name.strip())
    tables = []
    for name in models:
        model: Any = create(name, image_size=size).to(device, torch.float32 if training else precision)
        own_size = size or find_host(model).image_size
        for r in parse_reductions(reductions):
            for batch in parse_numbers(batches, "--batch"):
                trained = precision if training else None
                contest = Contest(names, r, batch, own_size, mode if compiled else None, rounds, trained)
                title = f"{name}, r={r}, batch {batch}, {own_size[0]}x{own_size[1]}, {describe_device(device)}, {dtype}"
                title += ", forward and backward" if training else ""
                results = _run(model, contest, title)
                tables.append((title, results, verdicts(results)))
    facts = {
        "command": shlex.join(["mctf", *sys.argv[1:]]),
        "device": describe_device(device),
        "dtype": dtype,
        "compiled": mode if compiled else None,
        "training": training,
        "rounds": rounds,
        "versions": versions(),
        "commit": commit(),
        "tables": [
            {"title": title, "rows": [asdict(row) for row in rows], "notes": lines} for title, rows, lines in tables
        ],
    }
    return facts, tables


def _run(model: Any, contest: "Contest", title: str) -> tuple["Result", ...]:
    import torch

    from ..analysis.benchmark import benchmark

    contenders = len(contest.methods) + 3
    with progress(title, total=contenders + contest.rounds + 2) as tick:
        try:
            return benchmark(model, contest, tick=tick)
        except torch.OutOfMemoryError:
            raise MctfError(f"too little memory for a batch of {contest.batch}: lower --batch") from None
