"""`mctf demo`: see it work on this machine, with nothing to download."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .._utils import plural
from ..models.loading import RANDOM, load_or_random
from .options import FILE, device_option, json_option, method_option, parse_reduction, reduction_option
from .output import check_folder, give_json, say_nothing
from .progress import progress

if TYPE_CHECKING:
    from ..evaluation.fidelity import Fidelity
    from ..viz.demo import Demonstration, Prediction, Speed

_PAYS = 1.02  # a smaller gain is less than two runs of one and the same model differ by


@click.command(
    "demo",
    epilog="""\b
Examples:
  mctf demo
  mctf demo -r 16 --batch 32 --output results --json
  mctf demo --model deit_tiny_patch16_224 --weights tiny.safetensors
""",
)
@click.option("--model", default="embedded", show_default=True, help="A timm model; embedded comes with mctf.")
@click.option("--weights", type=FILE, help="Weights file; pretrained or random ones by default.")
@reduction_option("fast")
@method_option
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Images a batch when timing.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Rounds of timing.")
@device_option
@click.option(
    "--output",
    "-o",
    type=FILE,
    default=Path("mctf-demo"),
    show_default=True,
    help="Folder for the picture.",
)
@json_option
def command(
    model: str,
    weights: Path | None,
    reduction: str,
    method: str,
    batch: int,
    rounds: int,
    device_name: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Fuse a model on photographs that come with scikit-image: its plan, speed-up, answers, and a picture.

    The default model is small and comes with its weights (docs/embedded.md). Of others, trained weights are used
    where timm has them in its cache or can fetch them at once; otherwise weights are random, and only cost, speed and
    picture mean something.
    """
    r = parse_reduction(reduction)
    check_folder(output, "--output")

    from ..evaluation.environment import pick_device, versions
    from ..viz.demo import WARMUP, Demonstration, photographs

    files, device = photographs(), pick_device(device_name)
    with progress(f"loading {model}"):
        loaded, source = load_or_random(model, weights=weights)
        demonstration = Demonstration.of(loaded, files, method=method, r=r, device=device)
    show = say_nothing if as_json else click.echo
    show(f"{demonstration.plan}\n\n{_weights_text(source, classes=demonstration.classes)}")

    with progress("timing", WARMUP + rounds) as advance:
        speed = demonstration.speed(batch=batch, rounds=rounds, after_round=advance)
    show(_speed_text(speed))
    fidelity, predictions = demonstration.predictions()
    show(_fidelity_text(fidelity, predictions, images=len(files), trained=source != RANDOM))
    picture = _draw(demonstration, output)
    show(f"picture: {picture}")

    facts = {
        "model": model,
        "weights": source,
        "method": method,
        "plan": demonstration.plan.as_dict(),
        "speed": asdict(speed),
        "fidelity": asdict(fidelity),
        "predictions": [asdict(each) for each in predictions] if source != RANDOM else None,
        "picture": str(picture),
        "versions": versions(),
    }
    give_json(facts, file=None, as_json=as_json)


def _draw(demonstration: "Demonstration", folder: Path) -> Path:
    from ..viz.contact_sheet import write_png

    with progress("drawing", len(demonstration.names)) as advance:
        sheet = demonstration.picture(advance)
    folder.mkdir(parents=True, exist_ok=True)
    write_png(sheet, folder / "fused.png")
    return folder / "fused.png"


def _weights_text(source: str, *, classes: int) -> str:
    if source != RANDOM:
        return f"weights: {source}" + (f", {plural(classes, 'class', 'classes')}" if classes else "")
    return (
        "weights: RANDOM. Pretrained ones are not in the cache and cannot be fetched from here, so the answers mean\n"
        "nothing; cost, speed and picture do. With --weights FILE the answers are real."
    )


def _speed_text(speed: "Speed") -> str:
    from ..evaluation.timing import DISTURBED, STEADY

    lines = [
        f"speed: {speed.fused_images_per_second:.1f} images/s fused, {speed.baseline_images_per_second:.1f} baseline: "
        f"{speed.speedup:.2f} times as fast",
        f"  medians over {plural(speed.rounds, 'round')} in turns, of both and of their ratio (middle half within "
        f"{speed.spread:.0%}), batch {speed.batch}, {speed.dtype}, {speed.device}",
    ]
    if speed.spread > STEADY:
        lines.append(f"  {DISTURBED}")
    elif speed.speedup < _PAYS:
        lines.append(
            "  fusing does not pay here: unless something else keeps the machine busy, finding the pairs costs what"
        )
        lines.append(
            "  the shorter sequence saves; try -r fast, which looks in fewer blocks, a larger model, image or --batch"
        )
    return "\n".join(lines)


def _fidelity_text(fidelity: "Fidelity", predictions: list["Prediction"], *, images: int, trained: bool) -> str:
    parts = [f"class-token cosine {fidelity.class_cosine:.4f}"]
    if fidelity.kl is not None:
        parts = [f"same first answer for {fidelity.agreement:.0f} %", f"KL {fidelity.kl:.4f}", *parts]
    lines = [f"fidelity to the plain model on {plural(images, 'photograph')}: {', '.join(parts)}"]
    if not trained:
        return f"{lines[0]}\n  of random weights: this says nothing about a trained model"
    for each in predictions:
        baseline = f"{each.baseline} {each.baseline_probability:.0%}"
        lines.append(f"  {each.photograph:10}{baseline:28} fused: {each.fused} {each.fused_probability:.0%}")
    return "\n".join(lines)
