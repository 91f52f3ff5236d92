"""`mctf reproduce`: the paper's tables and figures, measured again, as one page."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._utils import file_digest, plural
from ..errors import MctfError, one_line
from .options import (
    FILE,
    batch_size_option,
    classes_option,
    crop_option,
    device_option,
    image_size_option,
    json_option,
    limit_option,
    limits_options,
    on_corrupt_option,
    parse_names,
    progress_option,
    threads_option,
    weights_option,
)
from .output import check_folder, tell
from .progress import Command, open_run
from .progress import progress as progress_bar

if TYPE_CHECKING:
    from ..evaluation.setup import EvalRun
    from ..reproduce.records import Conditions, Record
    from ..reproduce.runner import Experiment, Subject

_QUICK_IMAGES = 96


class _Reproduce(Command):
    """Lets idle threads sleep: where another program uses one of two cores, spinning ones take six times as long."""

    def invoke(self, ctx: click.Context) -> Any:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when PyTorch is loaded
        return super().invoke(ctx)


@click.command(
    "reproduce",
    cls=_Reproduce,
    epilog="""\b
Examples:
  mctf reproduce --table 1,2 --out report
  mctf reproduce deit_tiny_patch16_224 --data val.zip --out report --quick
  mctf reproduce deit_tiny_patch16_224 --data val.zip \\
      --weights tiny.safetensors --classes classes.tsv --out report
  mctf reproduce deit_small_patch16_224 --data imagenet/val \\
      --limit 2000 --out report --only criteria,class_token
""",
)
@click.argument("model", required=False)
@click.option("--data", help="Folder or zip files of class/name images, or hf:NAME[:SPLIT].")
@weights_option
@classes_option
@click.option("--out", required=True, type=FILE, help="Folder for the report and its results.")
@click.option("--only", metavar="NAME,…", default="", help="Experiments to run, as in criteria,class_token.")
@click.option("--table", "tables", metavar="N,…", default="", help="Tables of the paper to measure: 1 to 4, A to E.")
@click.option("--quick", is_flag=True, help=f"{_QUICK_IMAGES} images and fewer settings: about three minutes.")
@click.option("--again", is_flag=True, help="Measure anew instead of reusing results in OUT.")
@image_size_option
@crop_option
@batch_size_option
@limit_option
@on_corrupt_option
@limits_options
@device_option
@threads_option
@progress_option
@json_option
def command(
    model: str | None,
    data: str | None,
    out: Path,
    only: str,
    tables: str,
    quick: bool,
    again: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure what the paper reports, with MODEL (a timm name, or hf:NAME) on your images, beside its figures.

    Writes OUT/index.html, a self-contained page, report.md and report.json. Without MODEL and --data only costs are
    counted. Finished experiments are kept in OUT/results and reused: an interrupted run resumes.
    """
    check_folder(out, "--out", inputs=() if data is None else (data, *data.split(",")))
    if (model is None) != (data is None):
        raise MctfError("MODEL and --data belong together: give both, or neither to count costs alone")

    from .._locks import lock_folder
    from ..evaluation.setup import RunOptions
    from ..reproduce.runner import choose, experiments
    from ..reproduce.write import check_dependencies

    requested = choose(experiments(), names=parse_names(only), tables=parse_names(tables))
    need_images = [each.name for each in requested if each.needs_images]
    if (only or tables) and need_images and model is None:
        raise MctfError(f"{', '.join(need_images)} cannot be measured without images: give MODEL and --data")
    check_dependencies()
    limit = min(options.pop("limit") or sys.maxsize, _QUICK_IMAGES if quick else sys.maxsize)
    lock = lock_folder(out, doing="measures in", option="--out")
    if model is None or data is None:
        with lock:
            report = _run(out, requested, None, {}, quick=quick, again=again, progress=options["progress"])
    else:
        with lock, open_run(RunOptions(model=model, data=data, limit=limit, **options)) as opened:
            subject, conditions = _subject(opened, quick=quick)
            report = _run(out, requested, subject, conditions, quick=quick, again=again, progress=options["progress"])
        skipped = opened.batches.skipped
        for note in opened.notes(images=len(opened.dataset) - skipped):
            tell(f"note: {note}", err=True)
    click.echo(json.dumps(report, indent=1) if as_json else out / "index.html")


def _run(
    out: Path,
    requested: Sequence["Experiment"],
    subject: "Subject | None",
    conditions: "Conditions",
    *,
    quick: bool,
    again: bool,
    progress: bool | None,
) -> dict[str, Any]:
    """Measure what is pending, write the report and return its JSON object."""
    from ..reproduce.records import Records
    from ..reproduce.runner import Task, arrange, check_subject, experiments, measure
    from ..reproduce.write import PICTURES, check_report_folder, write_report

    check_report_folder(out)
    records = Records.at(out, None if subject is None else conditions, experiments())
    work = arrange(experiments(), requested, records, subject=subject, again=again)
    if subject is not None and any(each.needs_images for each in work.pending):
        check_subject(subject)
    reused = [each.name for each in requested if each.name in work.finished]
    if reused:
        tell(f"measured before: {', '.join(reused)}", err=True)
    numbers = {each.name: index for index, each in enumerate(work.pending, start=1)}

    def announce(record: "Record") -> None:
        number = numbers[record.experiment]
        tell(f"{number} of {len(numbers)}: {record.experiment} in {record.seconds:.0f} s", err=True)

    steps = sum(each.steps(Task(subject, quick, out)) for each in work.pending)
    with progress_bar("reproducing", steps, wanted=progress) as advance:
        finished = measure(work, records, Task(subject, quick, out / PICTURES, advance), after=announce)
    return write_report(out, finished, facts=_facts(records.conditions, finished, subject), skipped=work.skipped)


def _subject(opened: "EvalRun", *, quick: bool) -> tuple["Subject", "Conditions"]:
    """The model with its images, and everything that results depend on."""
    from ..hosts import find_host
    from ..reproduce.runner import Subject

    settings = opened.options
    if opened.distributed.is_distributed:
        raise MctfError("mctf reproduce runs in one process: start it without torchrun")
    find_host(opened.model)  # refuses an unsupported model before anything is measured
    conditions: dict[str, Any] = {
        "model": settings.model,
        "weights": "pretrained" if settings.weights is None else settings.weights.name,
        "weights_bytes": None if settings.weights is None else settings.weights.stat().st_size,
        "weights_checksum": None if settings.weights is None else file_digest(settings.weights),
        "data": ",".join(Path(part.strip()).name for part in str(settings.data).split(",")),
        "images": len(opened.dataset),
        "images_checksum": opened.dataset.digest(),
        "image_size": list(opened.preprocessing.image_size),
        "crop_pct": opened.preprocessing.crop_pct,
        "classes": opened.dataset.targets is not None,
        "quick": quick,
    }
    if opened.batches.skips:  # which images are measured depends on these
        conditions["skipped_beyond"] = asdict(settings.limits)
    return Subject(settings.model, opened.model, opened.batches, opened.preprocessing), conditions


def _facts(conditions: "Conditions", finished: dict[str, "Record"], subject: "Subject | None") -> dict[str, str]:
    """The conditions of the run for the page, by heading."""
    from ..evaluation.environment import command_line, commit, describe_device, versions

    facts = {}
    if conditions:
        size = "x".join(str(side) for side in conditions["image_size"])
        facts["Model"] = f"{conditions['model']}, weights: {conditions['weights']}"
        facts["Images"] = (
            f"{conditions['images']} of {one_line(conditions['data'])}, {size}, crop {conditions['crop_pct']:g}"
        )
    if subject is not None:
        if subject.batches.skipped:
            facts["Images"] += f", {plural(subject.batches.skipped, 'unreadable image')} skipped"
        facts["Device"] = describe_device(next(subject.model.parameters()).device) + ", float32"
    facts["Versions"] = ", ".join(f"{name} {version}" for name, version in versions().items())
    source = commit()
    if source is not None:
        facts["Commit"] = source
    if finished:
        minutes = sum(record.seconds for record in finished.values()) / 60
        last = datetime.fromisoformat(max(record.date for record in finished.values()))
        facts["Measured"] = f"{last:%Y-%m-%d %H:%M} UTC, in {minutes:.1f} minutes"
    return facts | {"Command": command_line()}
