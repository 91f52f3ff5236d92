"""`mctf reproduce`: the paper's tables and figures, measured again, as one page."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import MctfError
from .options import (
    FILE,
    batch_size_option,
    classes_option,
    crop_option,
    device_option,
    image_size_option,
    json_option,
    limit_option,
    parse_names,
    progress_option,
    threads_option,
    weights_option,
)
from .output import check_folder
from .progress import progress as progress_bar

if TYPE_CHECKING:
    from ..evaluation.setup import EvalRun
    from ..reproduce.records import Conditions, Record
    from ..reproduce.runner import Experiment, Subject, Work

_QUICK_IMAGES = 96


@click.command(
    "reproduce",
    epilog="""\b
Examples:
  mctf reproduce --table 1,2 --out report
  mctf reproduce deit_tiny_patch16_224 --data val.zip --out report --quick
  mctf reproduce deit_tiny_patch16_224 --data val.zip --weights tiny.safetensors \\
      --classes classes.tsv --out report
  mctf reproduce deit_small_patch16_224 --data imagenet/val --limit 2000 --out report --only criteria,class_token
""",
)
@click.argument("model", required=False)
@click.option("--data", type=FILE, help="Folder or zip file of class/name images.")
@weights_option
@classes_option
@click.option("--out", required=True, type=FILE, help="Folder for the report and its results.")
@click.option("--only", metavar="NAME,…", default="", help="Experiments to run, as in criteria,class_token.")
@click.option("--table", "tables", metavar="N,…", default="", help="Tables of the paper to measure: 1 to 4, A to E.")
@click.option("--quick", is_flag=True, help=f"{_QUICK_IMAGES} images and fewer settings: about three minutes.")
@click.option("--again", is_flag=True, help="Measure anew what was measured before.")
@image_size_option
@crop_option
@batch_size_option
@limit_option
@device_option
@threads_option
@progress_option
@json_option
def command(
    model: str | None,
    data: Path | None,
    out: Path,
    only: str,
    tables: str,
    quick: bool,
    again: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Regenerate what the paper measures, with MODEL (a timm name, or hf:NAME) on your images, beside its figures.

    Writes OUT/index.html, a page that needs no network, report.md and report.json. Without MODEL and --data only
    costs are worked out. What is done is kept in OUT/results and not repeated: a run that was stopped goes on.
    """
    # Where another program has one of two cores, threads that spin while they wait took 148 s for what took these 23.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    check_folder(out, "--out")
    if (model is None) != (data is None):
        raise MctfError("MODEL and --data belong together: give both, or neither to work out costs alone")

    from ..evaluation.setup import RunOptions, open_run
    from ..reproduce.catalogue import EXPERIMENTS
    from ..reproduce.runner import choose

    wanted = choose(EXPERIMENTS, names=parse_names(only), tables=parse_names(tables))
    _check_wanted(wanted, model, named=bool(only or tables))
    limit = min(options.pop("limit") or sys.maxsize, _QUICK_IMAGES if quick else sys.maxsize)
    if model is None or data is None:
        known = _run(out, wanted, None, {}, quick=quick, again=again, progress=options["progress"])
    else:
        with open_run(RunOptions(model=model, data=data, limit=limit, **options)) as opened:
            subject, conditions = _subject(opened, quick=quick)
            known = _run(out, wanted, subject, conditions, quick=quick, again=again, progress=options["progress"])
        for note in opened.labels.notes:
            click.echo(f"note: {note}", err=True)
    click.echo(json.dumps(known, indent=1) if as_json else out / "index.html")


def _run(
    out: Path,
    wanted: Sequence["Experiment"],
    subject: "Subject | None",
    conditions: "Conditions",
    *,
    quick: bool,
    again: bool,
    progress: bool | None,
) -> dict[str, Any]:
    """Measure what is to be measured, write the report and give its JSON object."""
    from ..reproduce.catalogue import EXPERIMENTS
    from ..reproduce.records import Records
    from ..reproduce.runner import Task, arrange, measure
    from ..reproduce.write import PICTURES, publish

    records = Records.at(out, None if subject is None else conditions, EXPERIMENTS)
    work = arrange(EXPERIMENTS, wanted, records, subject=subject, again=again)
    tell = _teller(work, wanted)
    total = sum(each.steps(Task(subject, quick, out)) for each in work.todo)
    with progress_bar("reproducing", total, wanted=progress) as tick:
        task = Task(subject, quick, out / PICTURES, tick)
        found = measure(work, records, task, after=tell)
    return publish(out, found, facts=_facts(records.conditions, found, subject), left_out=work.left_out)


def _check_wanted(wanted: Sequence["Experiment"], model: str | None, *, named: bool) -> None:
    """Raise MctfError where what was named cannot be had without images."""
    needing = [each.name for each in wanted if each.needs_images]
    if named and needing and model is None:
        raise MctfError(f"{', '.join(needing)} cannot be measured without images: give MODEL and --data")


def _subject(opened: "EvalRun", *, quick: bool) -> tuple["Subject", "Conditions"]:
    """The model and its images, and all that results depend on."""
    from ..hosts import find_host
    from ..reproduce.runner import Subject

    asked = opened.options
    if opened.distributed.is_distributed:
        raise MctfError("mctf reproduce runs in one process: start it without torchrun")
    find_host(opened.model)  # refuses what cannot be fused before anything is measured
    conditions = {
        "model": asked.model,
        "weights": "pretrained" if asked.weights is None else asked.weights.name,
        "weights_bytes": None if asked.weights is None else asked.weights.stat().st_size,
        "data": asked.data.name,
        "images": len(opened.images),
        "image_size": list(opened.preprocessing.image_size),
        "crop_pct": opened.preprocessing.crop_pct,
        "classes": opened.labels.indices is not None,
        "quick": quick,
    }
    return Subject(asked.model, opened.model, opened.batches, opened.preprocessing), conditions


def _teller(work: "Work", wanted: Sequence["Experiment"]) -> Callable[["Record"], None]:
    """Says on stderr what was done before, and gives a function that says what has been done."""
    before = [each.name for each in wanted if each.name in work.known]
    if before:
        click.echo(f"measured before: {', '.join(before)}", err=True)
    numbers = {each.name: index for index, each in enumerate(work.todo, start=1)}

    def tell(record: "Record") -> None:
        number = numbers[record.experiment]
        click.echo(f"{number} of {len(numbers)}: {record.experiment} in {record.seconds:.0f} s", err=True)

    return tell


def _facts(conditions: "Conditions", found: dict[str, "Record"], subject: "Subject | None") -> dict[str, str]:
    """What the page says of the run, by heading."""
    from ..evaluation.environment import command_line, commit, describe_device, versions

    facts = {}
    if conditions:
        size = "x".join(str(side) for side in conditions["image_size"])
        facts["Model"] = f"{conditions['model']}, weights: {conditions['weights']}"
        facts["Images"] = f"{conditions['images']} of {conditions['data']}, {size}, crop {conditions['crop_pct']:g}"
    if subject is not None:
        facts["Device"] = describe_device(next(subject.model.parameters()).device) + ", float32"
    facts["Versions"] = ", ".join(f"{name} {version}" for name, version in versions().items())
    made_from = commit()
    if made_from is not None:
        facts["Commit"] = made_from
    if found:
        minutes = sum(record.seconds for record in found.values()) / 60
        last = datetime.fromisoformat(max(record.date for record in found.values()))
        facts["Measured"] = f"{last:%Y-%m-%d %H:%M} UTC, in {minutes:.1f} minutes"
    return facts | {"Command": command_line()}
