"""`mctf reproduce`: the paper's tables and figures, measured again, as one page."""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import MctfError
from .options import json_option
from .progress import progress as progress_bar
from .writing import check_folder

if TYPE_CHECKING:
    from ..analysis.reproduction.experiment import Experiment, Subject
    from ..analysis.reproduction.records import Conditions, Record
    from ..analysis.reproduction.running import Work

_FILE = click.Path(path_type=Path)
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
@click.option("--data", type=_FILE, help="Folder or zip file of class/name images.")
@click.option("--weights", type=_FILE, help="Weights file; timm's pretrained weights by default.")
@click.option("--classes", type=_FILE, help="TSV of index, class folder and name.")
@click.option("--out", required=True, type=_FILE, help="Folder for the report and its results.")
@click.option("--only", metavar="NAME,…", default="", help="Experiments to run, as in criteria,class_token.")
@click.option("--table", "tables", metavar="N,…", default="", help="Tables of the paper to measure: 1 to 4, A to E.")
@click.option("--quick", is_flag=True, help=f"{_QUICK_IMAGES} images and fewer settings: about three minutes.")
@click.option("--again", is_flag=True, help="Measure anew what was measured before.")
@click.option("--crop-pct", type=click.FloatRange(0.1, 1), help="Share of the shorter side in the crop.")
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True)
@click.option("--limit", type=click.IntRange(1), help="Use only so many images, evenly spaced.")
@click.option("--device", "device_name", help="As torch names it; a GPU where there is one by default.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads; torch's choice by default.")
@click.option("--progress/--no-progress", default=None, help="Progress bar on stderr; on a terminal by default.")
@json_option
def command(
    model: str | None,
    data: Path | None,
    out: Path,
    only: str,
    tables: str,
    quick: bool,
    again: bool,
    threads: int | None,
    progress: bool | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Regenerate what the paper measures, with MODEL (a timm name, or hf:NAME) on your images, beside its figures.

    Writes OUT/index.html, a page that needs no network, report.md and report.json. Without MODEL and --data only
    costs are worked out. What is done is kept in OUT/results and not repeated: a run that was stopped goes on.
    """
    check_folder(out, "--out")
    if (model is None) != (data is None):
        raise MctfError("MODEL and --data belong together: give both, or neither to work out costs alone")

    import torch

    from ..analysis.reproduction.experiment import Task
    from ..analysis.reproduction.records import Records
    from ..analysis.reproduction.running import arrange, choose, measure
    from ..report.reproduction.catalogue import EXPERIMENTS
    from ..report.reproduction.publishing import PICTURES, publish

    wanted = choose(EXPERIMENTS, names=_words(only), tables=_words(tables))
    _check_wanted(wanted, model, named=bool(only or tables))
    if threads is not None:
        torch.set_num_threads(threads)
    subject, conditions = (None, None) if model is None or data is None else _load(model, data, quick=quick, **options)
    records = Records.at(out, conditions, EXPERIMENTS)
    work = arrange(EXPERIMENTS, wanted, records, subject=subject, again=again)
    tell = _teller(work, wanted)
    total = sum(each.steps(Task(subject, quick, out)) for each in work.todo)
    with progress_bar("reproducing", total, wanted=progress) as tick:
        task = Task(subject, quick, out / PICTURES, lambda steps: _times(tick, steps))
        try:
            found = measure(work, records, task, after=tell)
        except torch.OutOfMemoryError:
            raise MctfError("there is too little memory for these batches: lower --batch-size") from None
    known = publish(out, found, facts=_facts(records.conditions, found, subject), left_out=work.left_out)
    click.echo(json.dumps(known, indent=1) if as_json else out / "index.html")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _check_wanted(wanted: Sequence["Experiment"], model: str | None, *, named: bool) -> None:
    """Raise MctfError where what was named cannot be had without images."""
    needing = [each.name for each in wanted if each.needs_images]
    if named and needing and model is None:
        raise MctfError(f"{', '.join(needing)} cannot be measured without images: give MODEL and --data")


def _load(
    name: str,
    data: Path,
    *,
    quick: bool,
    weights: Path | None,
    classes: Path | None,
    crop_pct: float | None,
    batch_size: int,
    limit: int | None,
    device_name: str | None,
) -> tuple["Subject", "Conditions"]:
    """The model and its images, and all that results depend on."""
    from ..analysis.environment import pick_device
    from ..analysis.reproduction.experiment import Subject
    from ..data import Batches, Preprocessing, find_images, find_labels
    from ..hosts import find_host
    from ..models.loading import load_model

    images = find_images(data)
    images = images.spaced(min(limit or len(images), _QUICK_IMAGES if quick else len(images)))
    model: Any = load_model(name, weights=weights).to(pick_device(device_name))
    find_host(model)  # refuses what cannot be fused before anything is measured
    labels = find_labels(images, num_classes=model.num_classes, table=classes)
    preprocessing = Preprocessing.of(model, crop_pct=crop_pct)
    batches = Batches(images, labels, preprocessing.transform(), batch_size=batch_size)
    conditions = {
        "model": name,
        "weights": "pretrained" if weights is None else weights.name,
        "weights_bytes": None if weights is None else weights.stat().st_size,
        "data": data.name,
        "images": len(images),
        "image_size": list(preprocessing.image_size),
        "crop_pct": preprocessing.crop_pct,
        "classes": labels.indices is not None,
        "quick": quick,
    }
    return Subject(name, model, batches, preprocessing), conditions


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


def _times(tick: Callable[[], None], steps: int) -> None:
    for _ in range(steps):
        tick()


def _facts(conditions: "Conditions", found: dict[str, "Record"], subject: "Subject | None") -> dict[str, str]:
    """What the page says of the run, by heading."""
    from ..analysis.environment import commit, describe_device, versions

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
        facts["Measured"] = f"until {max(record.date for record in found.values())}, {minutes:.1f} minutes"
    return facts | {"Command": shlex.join(["mctf", *sys.argv[1:]])}
