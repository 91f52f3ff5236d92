"""`mctf compare`: methods against each other at equal cost, on the user's own images."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._utils import plural
from ..errors import MctfError
from ..evaluation.setup import Measuring, measuring_options, title_of
from .options import FILE, parse_names
from .output import check_writable, give_json
from .progress import progress, ticking

if TYPE_CHECKING:
    from ..evaluation.compare import Outcome

_SAMPLE = 32  # images on which the cost of methods under which each image decides is found
_PACE = "images/s: median over full batches, each of which ran through all methods in turn"


@click.command(
    "compare",
    epilog="""\b
Examples:
  mctf compare deit_small_patch16_224 --data imagenet/val --gflops 2.6
  mctf compare deit_tiny_patch16_224 --data photos.zip --methods mctf,tome,evit --gflops 0.7 --limit 500
  mctf compare deit_tiny_patch16_224 --data val.zip --weights tiny.safetensors \\
      --classes classes.tsv --gflops 0.6,0.75,0.9 --plot methods.svg --json
""",
)
@click.argument("model")
@click.option("--methods", default="all", show_default=True, help="Methods, as in mctf,tome; or all.")
@click.option("--gflops", "targets", required=True, metavar="G,…", help="What each is to cost, as in 0.7 or 0.6,0.9.")
@click.option("--plot", type=FILE, help="Draw loss and accuracy over GFLOPs into this .png or .svg file.")
@measuring_options
def command(methods: str, targets: str, plot: Path | None, output: Path | None, as_json: bool, **options: Any) -> None:
    """Which method loses least on MODEL (a timm name, or hf:NAME) when all of them cost the same.

    Each method is brought as near to the wanted GFLOPs as it comes, in its own blocks. Agreement, KL and cosine
    compare with the plain model. Learned methods run as --weights holds them, else untrained, and are marked so.
    What cannot serve the model, or not at that cost, is listed with the reason.
    """
    names, costs = _parse_methods(methods), _parse_targets(targets)
    for path in (output, plot):
        if path is not None:
            check_writable(path)
    if plot is not None:
        from ..viz.plots import check_format

        check_format(plot)
    compared = _compare(Measuring(**options), names, costs)
    if compared is None:  # another process speaks for all
        return
    facts, outcome = compared
    give_json(facts, file=output, as_json=as_json)
    if plot is not None:
        from ..viz.plots import draw, panels, write_plot

        write_plot(draw(panels(outcome), title=f"{facts['model']}, {plural(facts['images'], 'image')}"), plot)
    if as_json:
        return
    from .tables import print_outcome

    lines = [f"not taking part: {each['method']}: {each['reason']}" for each in facts["refusals"]]
    notes = [f"note: {note}" for note in facts["notes"]]
    print_outcome(outcome, title=title_of(facts), notes=[*facts["verdicts"], *lines, *notes])


def _compare(measuring: Measuring, methods: list[str], targets: list[float]) -> tuple[dict[str, Any], "Outcome"] | None:
    """The JSON object and what it is made of; None in all processes but the first."""
    from dataclasses import asdict

    from ..evaluation.compare import compete, enter, verdicts

    with measuring.open() as subject:
        first, batches = subject.processes.is_main, subject.batches
        wanted = measuring.progress if first else False
        with progress("finding r", len(methods), wanted=wanted) as tick:
            sample = subject.sample(_SAMPLE)
            entrants, refusals = enter(subject.model, methods, targets, images=sample, tick=tick)
        if not entrants:
            raise MctfError(f"no method takes part: {refusals[0].reason}")
        with progress("batches", len(batches), wanted=wanted) as tick:
            outcome = compete(subject.model, ticking(batches, tick), entrants)
    if not first:
        return None
    facts = {
        **measuring.facts(subject, images=outcome.images),
        "targets": targets,
        "base": asdict(outcome.base),
        "rows": [standing.as_dict() for standing in outcome.standings],
        "refusals": [asdict(refusal) for refusal in refusals],
        "verdicts": verdicts(outcome.standings),
        "notes": [*subject.dataset.notes, *outcome.notes, _PACE],
    }
    return facts, outcome


def _parse_methods(text: str) -> list[str]:
    """Names between commas, each checked and taken once; "all" for every one there is."""
    from ..methods import make_method
    from ..methods import methods as registered

    names = list(dict.fromkeys(parse_names(text)))
    if names == ["all"]:
        return list(registered())
    if not names:
        raise MctfError("there is nothing to compare: name at least one method (--methods mctf,tome), or all")
    for name in names:
        make_method(name, {})
    return names


def _parse_targets(text: str) -> list[float]:
    """Positive numbers between commas, each once."""
    try:
        costs = list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        costs = []
    if not costs or not all(0 < cost < float("inf") for cost in costs):
        raise MctfError(f"--gflops {text!r} is not a list of positive numbers: write 0.7 or 0.6,0.75,0.9")
    return costs
