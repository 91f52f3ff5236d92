"""`mctf tune`: how many tokens each block should merge, searched on images without labels."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import __version__
from .._utils import optional_import, plural
from ..errors import MctfError
from .options import BUDGET, FILE, FiniteRange, data_options, json_option, options_option, parse_options
from .output import check_outputs, echo
from .progress import Command, open_run, progress

if TYPE_CHECKING:
    from ..evaluation.setup import EvalRun
    from ..evaluation.tune import Tuning

_FEWEST, _MOST = 2, 100_000  # images
_TIMED = 32  # images of a batch when speed is measured


@click.command(
    "tune",
    cls=Command,
    epilog="""\b
Examples:
  mctf tune deit_small_patch16_224 --data photos --flops 0.56
  mctf tune deit_small_patch16_224 --data photos --max-kl 0.02 \\
      --output gentle.json --plot gentle.svg
  mctf tune deit_small_patch16_224 --data photos --speedup 1.7 --device cuda
  mctf eval deit_small_patch16_224 --data imagenet/val \\
      --schedule schedule.json
""",
)
@click.argument("model")
@click.option("--flops", type=BUDGET, help="The share of the unfused model's FLOPs to keep, as 0.56.")
@click.option("--max-kl", type=FiniteRange(0, min_open=True), help="The cheapest schedule whose KL is at most this.")
@click.option("--speedup", type=FiniteRange(1, 1000, min_open=True), help="Measured on this device, as 1.7.")
@click.option("--method", "-m", default="ward", show_default=True, help="Token-reduction method.")
@options_option
@click.option(
    "--images", type=click.IntRange(_FEWEST, _MOST), default=256, show_default=True, help="Images to measure on."
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Chooses the images.")
@click.option(
    "--cache", type=FILE, help="Keep scores in this file for other budgets; by default beside the output until the end."
)
@click.option("--plot", type=FILE, help="Plot KL over FLOPs into this .png or .svg file.")
@data_options(
    click.option(
        "--output", "-o", type=FILE, default=Path("schedule.json"), show_default=True, help="Schedule to write."
    ),
    json_option,
)
def command(
    flops: float | None,
    max_kl: float | None,
    speedup: float | None,
    method: str,
    pairs: tuple[str, ...],
    images: int,
    seed: int,
    cache: Path | None,
    plot: Path | None,
    output: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Search how many tokens each block of MODEL (a timm name, or hf:NAME) merges.

    Schedules are compared by KL to the unfused model on images of --data; labels are not used. The table shows the
    schedule for the budget and others around it, beside the method's own schedules. An interrupted search continues
    when the same command is given again. mctf.fuse(model, schedule="schedule.json") and --schedule of every command
    take the result.
    """
    wanted = {"--flops": flops, "--max-kl": max_kl, "--speedup": speedup}
    if sum(value is not None for value in wanted.values()) != 1:
        raise MctfError("there must be one aim: give --flops 0.56, --max-kl 0.02 or --speedup 1.7")
    progress_file = cache or output.with_name(output.name + ".progress")
    inputs = (options["data"], options["weights"], options["classes"])
    check_outputs(output, plot, progress_file, inputs=inputs)
    if plot is not None:
        optional_import("matplotlib", extra="report", purpose="plots")
        from ..viz.plots import check_format

        check_format(plot)
    method_options = parse_options(pairs)
    _check_method(method, method_options)

    from ..evaluation.environment import command_line
    from ..evaluation.kl_meter import KLMeter, ScoreFile, scores_digest
    from ..evaluation.setup import RunOptions
    from ..evaluation.tune import Tuner
    from ..hosts import find_host
    from ..planning import plan
    from ..schedule_file import Schedule

    with open_run(RunOptions(**options)) as run:
        if run.distributed.world_size > 1:
            raise MctfError("mctf tune runs in one process: start it without torchrun")
        plan(run.model, method=method, **method_options)  # refused before images are read
        if getattr(run.model, "num_classes", 0) < 1:
            raise MctfError("the model has no classifier, so there is no KL: tune a model that has one")
        size = run.preprocessing.image_size
        with progress("reading images", wanted=run.options.progress) as tick:
            batches, digest = _read(run, images, seed, tick)
        settings = {
            "method": method,
            "options": method_options,
            "size": size,
            "dtype": run.options.dtype,
            "device": run.distributed.device.type,
            "crop": run.preprocessing.crop_pct,
            "mctf": __version__,
        }
        resumed = progress_file.exists()
        file = ScoreFile.open(progress_file, scores_digest(run.model, images=digest, settings=settings))
        meter = KLMeter(run.model, batches, method=method, options=method_options, file=file)
        architecture = find_host(run.model).architecture(size)
        tuner = Tuner(run.model, meter, method=method, options=method_options, architecture=architecture)
        try:
            with progress("tuning", tuner.passes(), wanted=run.options.progress) as bar:
                meter.tick, tuner.phase = bar, bar.describe
                if flops is not None:
                    tuning = tuner.tune_flops(flops)
                elif max_kl is not None:
                    tuning = tuner.tune_kl(max_kl)
                else:
                    batch = batches[0][:_TIMED].to(next(run.model.parameters()).device)
                    tuning = tuner.tune_speedup(speedup or 1, batch=batch)
        except MctfError:  # an aim out of reach; an interrupted search keeps its scores
            if cache is None and not resumed:
                progress_file.unlink(missing_ok=True)
            raise
    best = tuning.best
    schedule = Schedule(
        model=run.options.model,
        method=method,
        options=method_options,
        depth=tuner.depth,
        tokens=tuner.architecture.tokens,
        protected=tuner.architecture.protected,
        channels=tuner.architecture.blocks[0].channels,
        heads=tuner.architecture.blocks[0].heads,
        r=best.tuned,
        flops=round(best.flops, 6),
        kl=best.kl,
        images=meter.images,
        seed=seed,
        mctf=__version__,
        command=command_line(),
    )
    schedule.write(output)
    if plot is not None:
        _plot(tuning, plot, title=f"{run.options.model}, {method}, {plural(meter.images, 'image')}")
    if cache is None:
        progress_file.unlink(missing_ok=True)
    if as_json:
        import json

        facts = {
            **run.facts(images=meter.images),
            "schedule": schedule.as_dict(),
            "speedup": tuning.speedup,
            "points": [asdict(point) for point in tuning.points],
            "output": str(output),
        }
        click.echo(json.dumps(facts, indent=2))
    else:
        from .tables import print_tuning

        title = f"{run.options.model}, {method}, KL on {plural(meter.images, 'image')} of {run.options.data}"
        print_tuning(tuning, title=title)
        echo(f"schedule: {output}")


def _check_method(method: str, options: dict[str, Any]) -> None:
    """Raise MctfError for a method without a schedule to tune."""
    from ..methods import make_method

    made = make_method(method, options)
    if made.adaptive:
        raise MctfError(f"{method} keeps as many tokens as each image needs: tune another method, as ward")
    if made.learned:
        raise MctfError(f"{method} has learned layers for its own blocks: tune another method, as ward")


def _read(run: "EvalRun", count: int, seed: int, tick: Any) -> tuple[list[Any], str]:
    """`count` images drawn with this seed, as batches in the dtype of the model, and their checksum."""
    import torch

    from ..data import EvalLoader

    dataset, loader = run.dataset, run.batches
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    chosen = dataset.subset(order)
    batches = EvalLoader(
        chosen,
        loader.transform,
        batch_size=loader.batch_size,
        workers=loader.workers,
        device=loader.device,
        on_corrupt=loader.on_corrupt,
    )
    dtype = next(run.model.parameters()).dtype
    read = []
    for batch in batches:
        read.append(batch.pixels.to(dtype))
        tick()
    if sum(map(len, read)) < _FEWEST:
        raise MctfError(f"there is only one image to tune on: give {_FEWEST} or more, 128 to 512 suffice")
    return read, f"{chosen.digest()} {sum(map(len, read))} {loader.batch_size}"


def _plot(tuning: "Tuning", path: Path, *, title: str) -> None:
    from ..viz.plots import Line, Panel, draw, write_plot

    tuned = tuple((100 * point.flops, point.kl) for point in tuning.points if point.kl > 0)
    default = tuple((100 * point.default_flops, point.default_kl) for point in tuning.points if point.default_kl > 0)
    lines = tuple(
        Line(name, points, strong=name == "tuned")
        for name, points in (("default", default), ("tuned", tuned))
        if points
    )
    panel = Panel(lines, "% of the baseline's FLOPs", "KL to the baseline, nats", logarithmic=True)
    write_plot(draw([panel], title=title), path)
