"""`mctf compare`: which method stays closest to the baseline's predictions at equal cost."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .._utils import optional_import, plural
from ..errors import MctfError
from .options import BUDGETS, FILE, NAMES, Parsed, run_options, schedule_option, trim_last_option
from .output import check_outputs, give_json
from .progress import Command, open_run, progress

_SAMPLE = 32  # images on which the cost of adaptive methods is measured
_THROUGHPUT = "images/s: median over full batches, each of which ran through all methods in turn"


def parse_targets(text: str) -> list[float]:
    """Positive numbers between commas, each once."""
    try:
        targets = list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        targets = []
    if not targets or not all(0 < target < float("inf") for target in targets):
        raise MctfError(f"--gflops {text!r} is not a list of positive numbers: write 0.7 or 0.6,0.75,0.9")
    return targets


@click.command(
    "compare",
    cls=Command,
    epilog="""\b
Examples:
  mctf compare deit_small_patch16_224 --data imagenet/val --gflops 2.6
  mctf compare deit_small_patch16_224 --data imagenet/val --flops 0.56
  mctf compare deit_tiny_patch16_224 --data photos.zip \\
      --methods mctf,tome,evit --gflops 0.7 --limit 500
  mctf compare deit_tiny_patch16_224 --data val.zip \\
      --weights tiny.safetensors --classes classes.tsv \\
      --gflops 0.6,0.75,0.9 --plot methods.svg --json
""",
)
@click.argument("model")
@click.option("--methods", type=NAMES, default="all", show_default=True, help="Methods, as in mctf,tome; or all.")
@click.option("--gflops", "targets", type=Parsed("g,…", parse_targets), help="Target costs: 0.7 or 0.6,0.9.")
@click.option(
    "--flops", "budgets", type=BUDGETS, help="Target costs as shares of the unfused model's FLOPs: 0.56 or 0.56,0.67."
)
@schedule_option
@trim_last_option
@click.option("--plot", type=FILE, help="Plot KL and accuracy over GFLOPs into this .png or .svg file.")
@run_options
def command(
    methods: list[str],
    targets: list[float] | None,
    budgets: list[float] | None,
    schedule: Path | None,
    trim_last: bool | None,
    plot: Path | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Which method stays closest to the predictions of MODEL at equal cost.

    MODEL is a timm name, or hf:NAME. Each method is brought as close to the target cost as possible, in its own
    blocks. A schedule is compared at its own cost. Agreement, KL and cosine compare with the baseline, the unfused
    model. Learned methods use the layers in --weights, otherwise untrained ones, which the table marks. A method that
    does not support the model, or cannot reach a target, is listed with the reason.
    """
    methods = _known_methods(methods)
    check_outputs(output, plot, inputs=(options["data"], options["weights"], options["classes"], schedule))
    if targets is None and budgets is None and schedule is None:
        raise MctfError("there is no cost to compare at: give --flops 0.56, or --gflops 0.7")
    if plot is not None:
        optional_import("matplotlib", extra="report", purpose="plots")
        from ..viz.plots import check_format

        check_format(plot)

    from ..evaluation.compare import compare, find_candidates, schedule_candidate, verdicts
    from ..evaluation.setup import RunOptions
    from ..planning import plan
    from ..schedule_file import read_schedule

    saved = None if schedule is None else read_schedule(schedule)

    with open_run(RunOptions(**options)) as run:
        wanted = run.options.progress
        with progress("matching FLOPs", len(methods), wanted=wanted) as tick:
            sample = run.sample(_SAMPLE)
            baseline = plan(run.model, r=0, image_size=(sample.shape[2], sample.shape[3])).gflops_base
            targets = list(dict.fromkeys([*(targets or ()), *(share * baseline for share in budgets or ())]))
            tuned = []
            if saved is not None:
                name = str(schedule)
                tuned = [schedule_candidate(run.model, saved, name=name, images=sample, trim_last=trim_last)]
            targets += [each.target for each in tuned if each.target is not None and each.target not in targets]
            candidates, refusals = find_candidates(
                run.model, methods, targets, images=sample, trim_last=trim_last, tick=tick
            )
        candidates += tuned
        if not candidates:
            raise MctfError(f"no method can be compared: {refusals[0].reason}")
        with progress("comparing", len(run.batches) * (1 + len(candidates)), wanted=wanted) as tick:
            comparison = compare(run.model, run.batches, candidates, tick=tick)
    if not run.distributed.is_main:  # only rank 0 reports
        return
    facts = {
        **run.facts(images=comparison.images),
        "targets": targets,
        "baseline": asdict(comparison.baseline),
        "rows": [result.as_dict() for result in comparison.results],
        "refusals": [asdict(refusal) for refusal in refusals],
        "verdicts": verdicts(comparison.results),
        "notes": [*run.notes(images=comparison.images), *comparison.notes, _THROUGHPUT],
    }
    give_json(facts, file=output, as_json=as_json)
    try:
        if plot is not None:
            from ..viz.plots import draw, panels, write_plot

            title = f"{facts['model']}, {plural(facts['images'], 'image')}"
            write_plot(draw(panels(comparison), title=title), plot)
    finally:  # also where the plot cannot be written
        if not as_json:
            from .tables import print_comparison, run_title

            refused = [f"not compared: {refusal.method}: {refusal.reason}" for refusal in refusals]
            notes = [f"note: {note}" for note in facts["notes"]]
            print_comparison(comparison, title=run_title(facts), notes=[*facts["verdicts"], *refused, *notes])


def _known_methods(names: list[str]) -> list[str]:
    """Each method once, all of them for "all"; raises MctfError for unknown ones."""
    from ..methods import make_method
    from ..methods import methods as registered

    if names == ["all"]:
        return list(registered())
    if not names:
        raise MctfError("there is nothing to compare: name at least one method (--methods mctf,tome), or all")
    for name in names:
        make_method(name, {})
    return list(dict.fromkeys(names))
