"""`mctf embed`: vectors of millions of images, in shards, resumable; and what fusing costs them."""

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._utils import plural
from ..errors import MctfError, shown
from .options import (
    FILE,
    REDUCTION,
    batch_size_option,
    blocks_option,
    crop_option,
    device_option,
    dtype_option,
    flops_option,
    image_size_option,
    json_option,
    limits_options,
    options_option,
    parse_options,
    progress_option,
    threads_option,
    weights_option,
)
from .output import check_folder, echo, give_json
from .progress import Command, progress

if TYPE_CHECKING:
    from ..core.schedule import ReductionSpec
    from ..embedding.check import Check
    from ..embedding.embedder import Embedder
    from ..embedding.job import EmbedJob, ShardReport
    from ..embedding.sources import Source


@click.command(
    "embed",
    cls=Command,
    epilog="""\b
Examples:
  mctf embed deit_small_patch16_224 --data photos --check 500 --flops 0.56
  mctf embed deit_small_patch16_224 --data photos --flops 0.56 \\
      --output vectors
  mctf embed hf:openai/clip-vit-base-patch32 --normalize --format npy \\
      --data 'shards/{00000..00127}.tar' --output vectors --dtype bfloat16
  mctf embed vit_large_patch14_dinov2 --data images.parquet --column image \\
      --output vectors --decode gpu --compile --batch-size 256
  mctf embed deit_small_patch16_224 --data photos --output vectors \\
      --shard 3/8
  mctf embed deit_small_patch16_224 --data photos --output vectors \\
      --engine ray
""",
)
@click.argument("model")
@click.option(
    "--data",
    required=True,
    help="Folder, zip, tar ({000..127}.tar) or parquet files, a text file of paths, hf:NAME[:SPLIT], or URLs.",
)
@click.option("--output", type=FILE, help="Folder for the vectors; a run into the same folder goes on.")
@click.option("--check", "count", type=click.IntRange(2, 100_000), help="Compare on this many images; write nothing.")
@click.option("-r", "r", type=REDUCTION, help="Tokens to fuse per block: 16, 0.35 or fast; 0 for the unfused model.")
@flops_option
@click.option("--schedule", type=FILE, help="In place of -r and --method: a file of mctf tune, or a name in mctf.")
@click.option("--method", "-m", help="Token-reduction method; ward by default, the closest to the unfused model.")
@options_option
@blocks_option
@weights_option
@click.option("--random-weights", is_flag=True, help="Without trained weights, to measure speed.")
@click.option(
    "--vector",
    default="auto",
    show_default=True,
    help="class, mean, attention, projection (CLIP, SigLIP) or logits; auto: the projection of CLIP, else what the "
    "head reads.",
)
@click.option("--normalize", is_flag=True, help="Vectors of length 1.")
@click.option("--vector-dtype", type=click.Choice(("fp32", "fp16")), default="fp32", show_default=True)
@click.option("--top-k", type=click.IntRange(0), default=0, help="Also write the most likely classes.")
@click.option("--format", "form", type=click.Choice(("parquet", "npy", "lance")), default="parquet", show_default=True)
@click.option("--column", help="Of parquet files: the column with encoded images or paths.")
@click.option("--key-column", help="Of parquet files: the column with a name per image.")
@click.option(
    "--shard-size", type=click.IntRange(1), default=10_240, show_default=True, help="Images; a tar file is one shard."
)
@click.option("--shard", "part", metavar="K/N", help="Only the K-th of N parts of the shards, for job arrays.")
@click.option("--on-corrupt", type=click.Choice(("skip", "stop")), default="skip", show_default=True)
@image_size_option
@crop_option
@batch_size_option
@click.option("--workers", type=click.IntRange(0), help="Loader processes; none on the CPU by default.")
@click.option(
    "--decode", type=click.Choice(("cpu", "gpu")), default="cpu", show_default=True, help="Where JPEG is decoded."
)
@click.option("--compile", "compiled", is_flag=True, help="torch.compile, with CUDA graphs on a GPU.")
@click.option("--engine", type=click.Choice(("local", "ray")), default="local", show_default=True)
@click.option("--ray-address", help="Of a Ray cluster; one is started on this machine by default.")
@click.option("--actors", type=click.IntRange(1), help="Ray workers; one per GPU, or per CPU, by default.")
@limits_options
@device_option
@dtype_option
@threads_option
@progress_option
@json_option
def command(
    model: str,
    data: str,
    output: Path | None,
    count: int | None,
    r: "ReductionSpec | None",
    flops: float | None,
    schedule: Path | None,
    method: str | None,
    pairs: tuple[str, ...],
    blocks: tuple[int, ...] | None,
    weights: Path | None,
    random_weights: bool,
    vector: str,
    normalize: bool,
    vector_dtype: str,
    top_k: int,
    form: str,
    column: str | None,
    key_column: str | None,
    shard_size: int,
    part: str | None,
    on_corrupt: str,
    image_size: tuple[int, int] | None,
    crop_pct: float | None,
    batch_size: int,
    workers: int | None,
    decode: str,
    compiled: bool,
    engine: str,
    ray_address: str | None,
    actors: int | None,
    device_name: str | None,
    dtype: str,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write one vector per image of --data by MODEL (a timm name, or hf:NAME), fused.

    A shard is written whole or not at all. The same command again completes what is missing; another model or setting
    is refused. With torchrun, the processes share the shards.

    --check N embeds N images with the fused and the unfused model. It shows the cosine of both vectors; recall@k, the
    share of the k nearest images by unfused vectors that are among the k nearest by fused ones, where the query image
    itself does not count; the same with fused vectors as queries to an index of unfused ones ("old index"); and both
    speeds.
    """
    if (output is None) == (count is None):
        raise MctfError("give one of --output, to write vectors, and --check, to see what fusing costs them")
    if output is not None:
        if "://" in str(output) or ":/" in str(output):
            raise MctfError(f"--output {output} is a URL: write into a folder, as of a mounted file system")
        check_folder(output, "--output", inputs=[data])
    if engine == "local" and (ray_address or actors):
        raise MctfError("--ray-address and --actors belong to --engine ray: add it")
    if count is not None:
        for name, given, default in (
            ("--engine", engine, "local"),
            ("--shard", part, None),
            ("--format", form, "parquet"),
            ("--decode", decode, "cpu"),
        ):
            if given != default:
                raise MctfError(f"--check writes nothing, in this process and decoded on the CPU: leave out {name}")

    from ..data import ReadLimits
    from ..distributed import gather_at_end, read_ranks
    from ..embedding.embedder import Embedder
    from ..embedding.job import EmbedJob
    from ..embedding.sources import open_source
    from ..embedding.vectors import VECTORS
    from ..errors import did_you_mean
    from ..evaluation.environment import pick_device

    if vector not in VECTORS:
        raise MctfError(f"--vector {vector!r} is not known: {did_you_mean(vector, VECTORS)}")
    first, parts = (1, 1) if part is None else _parse_part(part)
    wanted = options.pop("progress")
    limits = ReadLimits.of(**options)
    ranks = read_ranks(pick_device(device_name))
    if ranks.is_distributed and engine == "ray":
        raise MctfError("--engine ray starts its own processes: run it without torchrun")
    settings: dict[str, Any] = {
        "weights": weights,
        "random_weights": random_weights,
        "vector": vector,
        "normalize": normalize,
        "vector_dtype": vector_dtype,
        "top_k": top_k,
        "image_size": image_size,
        "crop_pct": crop_pct,
        "dtype": dtype,
        "device": str(ranks.device) if ranks.is_distributed else device_name,
        "batch_size": batch_size,
        "compile": compiled,
        "limits": limits,
        "threads": threads,
    }
    embedder = Embedder(
        model,
        method=method,
        r=r,
        flops=flops,
        blocks=blocks,
        schedule=schedule,
        options=parse_options(pairs),
        **settings,
    )
    with progress(f"loading {model} and the names of images", wanted=wanted):
        source = open_source(data, column=column, key_column=key_column, limits=limits)
        _ = embedder.loaded
    if count is not None:
        unfused = Embedder(model, r=0, **settings)
        stop = on_corrupt == "stop"
        _check(embedder, unfused, source, count, workers=workers, stop=stop, wanted=wanted, as_json=as_json)
        return
    assert output is not None
    job = EmbedJob(source, output, embedder, model, form, shard_size, decode, on_corrupt, workers)
    numbers = list(range(first - 1, len(job.shards), parts))[ranks.rank :: ranks.world_size]
    from ..evaluation.environment import command_line

    if engine == "local":
        job.check_device()
    if (note := job.prepare(command=command_line())) and ranks.is_main:
        echo(f"note: {note}", err=True)
    pending = job.pending(numbers)
    title = f"embedding as process {ranks.rank} of {ranks.world_size}" if ranks.is_distributed else "embedding"
    runs = [_run(job, pending, engine=engine, address=ray_address, actors=actors, wanted=wanted, title=title)]
    runs = gather_at_end(ranks, runs[0])
    reports, seconds = [report for each, _ in runs for report in each], max(seconds for _, seconds in runs)
    counts = job.summarize()
    if ranks.is_main and len(runs) < ranks.world_size:
        echo(f"note: process 0 does not find the other {ranks.world_size - 1}: images/s are its own", err=True)
    if ranks.is_main:
        _report(job, reports, counts, seconds, as_json=as_json)
    if unfinished := [report for report in reports if report.unfinished]:
        names = ", ".join(job.layout.name(report.number) for report in unfinished[:5])
        raise MctfError(
            f"{plural(len(unfinished), 'shard')} not finished ({names}{', …' if unfinished[5:] else ''}): "
            f"{unfinished[0].unfinished}, then run this command again; finished shards are whole"
        )


def _run(
    job: "EmbedJob",
    pending: list[int],
    *,
    engine: str,
    address: str | None,
    actors: int | None,
    wanted: bool | None,
    title: str,
) -> "tuple[list[ShardReport], float]":
    """The reports of these shards, and the seconds they took."""
    from ..embedding.ray_engine import run_on_ray

    shards = job.shards
    lengths = [None if shards[number].stop is None else _length(shards[number]) for number in pending]
    total = len(pending) if None in lengths or engine == "ray" else sum(length or 0 for length in lengths)
    reports: list[ShardReport] = []
    start = time.perf_counter()
    if not pending:
        return reports, 0.0
    with progress(title, total, wanted=wanted) as bar:

        def tick(images: int, text: str) -> None:
            bar.describe(f"{title}, {text}")
            if total != len(pending):
                bar(images)

        on_ray = engine == "ray"
        runs = run_on_ray(job, pending, address=address, actors=actors) if on_ray else job.run(pending, tick)
        with closing(runs):
            for report in runs:
                reports.append(report)
                if on_ray:
                    speed = sum(each.images for each in reports) / (time.perf_counter() - start)
                    bar.describe(f"{title}, {speed:,.0f} images/s")
                if total == len(pending):
                    bar()
    return reports, time.perf_counter() - start


def _length(shard: Any) -> int:
    return shard.stop - shard.start


def _report(
    job: "EmbedJob", reports: "list[ShardReport]", counts: dict[str, int], seconds: float, *, as_json: bool
) -> None:
    images, failed = sum(each.images for each in reports), sum(each.failed for each in reports)
    whole = counts["shards_finished"] == len(job.shards)
    if not counts["images"] and (whole or failed):
        if counts["failed"]:
            raise MctfError(f"none of {counts['failed']} images is readable, the first: {job.first_failure()}")
        raise MctfError(f"{job.source.name} holds no images: {job.output} has no vectors; name other --data")
    speed = images / seconds if seconds else 0.0
    facts = {
        "output": str(job.output),
        "settings": job.settings(),
        "shards": len(job.shards),
        **counts,
        "this_run": {
            "shards": sum(each.unfinished is None for each in reports),
            "images": images,
            "failed": failed,
            "unfinished": [each.number for each in reports if each.unfinished],
            "seconds": seconds,
            "images_per_second": speed,
        },
    }
    give_json(facts, file=None, as_json=as_json)
    if as_json:
        return
    loaded = job.embedder.loaded.facts
    fusion = "unfused" if loaded["method"] is None else f"{loaded['method']}"
    echo(
        f"{job.name}, {fusion}, {loaded['gflops']:.2f} GFLOPs of {loaded['gflops_base']:.2f}, "
        f"vectors of {loaded['dimension']} ({job.form}, {job.embedder.vector_dtype})"
    )
    if reports:
        written = plural(sum(each.unfinished is None for each in reports), "shard")
        echo(f"{plural(images, 'image')} in {written}, {speed:,.1f} images/s")
    else:
        echo("nothing was missing")
    echo(
        f"{job.output}: {counts['shards_finished']} of {plural(len(job.shards), 'shard')}, {counts['images']:,} images"
    )
    if counts["failed"]:
        echo(f"note: {plural(counts['failed'], 'image')} not readable, listed in {job.output}/*_failures.jsonl")


def _parse_part(text: str) -> tuple[int, int]:
    """K and N of "K/N"; raises MctfError."""
    first, slash, last = text.partition("/")
    if slash and first.isdecimal() and last.isdecimal() and len(text) < 20 and 1 <= int(first) <= int(last):
        return int(first), int(last)
    raise MctfError(f"--shard {shown(text, 40)} is no K/N: write 1/8 to 8/8, one per job")


def _check(
    fused: "Embedder",
    unfused: "Embedder",
    source: "Source",
    count: int,
    *,
    workers: int | None,
    stop: bool,
    wanted: bool | None,
    as_json: bool,
) -> None:
    from ..embedding.check import check, facts

    with progress("loading the unfused model", wanted=wanted):
        _ = unfused.loaded
    with progress("embedding with both models", count, wanted=wanted) as bar:
        result = check(
            fused, unfused, source, count, workers=workers, stop_on_corrupt=stop, tick=lambda images, _: bar(images)
        )
    give_json({"model": str(fused.model), "data": source.name, **facts(result)}, file=None, as_json=as_json)
    if not as_json:
        _print_check(fused, result)


def _print_check(fused: "Embedder", result: "Check") -> None:
    method = fused.loaded.facts["method"] or "unfused"
    echo(f"{plural(result.images, 'image')}, {fused.loaded.facts['dimension']} dimensions")
    rows = [
        ("", "unfused", method),
        ("GFLOPs", f"{result.unfused_gflops:.2f}", f"{result.fused_gflops:.2f}"),
        ("images/s", f"{result.unfused_speed:,.1f}", f"{result.fused_speed:,.1f} ({result.speedup:.2f}x)"),
        ("cosine, mean", "1", f"{result.cosine_mean:.4f}"),
        ("cosine, least", "1", f"{result.cosine_least:.4f}"),
    ]
    for k, each in result.recall.items():
        rows.append((f"recall@{k}", "1", f"{each.among_others:.3f}"))
        rows.append((f"recall@{k}, old index", "1", f"{each.mixed:.3f}"))
    for name, left, right in rows:
        echo(f"  {name:20}{left:>12}  {right}")
    if result.failed:
        echo(f"note: {plural(result.failed, 'unreadable image')} left out")
