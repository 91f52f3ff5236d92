"""`mctf demo`: token fusion on this machine, without downloads."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._utils import plural
from .options import FILE, amount_options, default_r, device_option, json_option
from .output import check_folder, echo, give_json, say_nothing
from .progress import Command, progress

if TYPE_CHECKING:
    from ..core.schedule import ReductionSpec
    from ..evaluation.fidelity import Fidelity
    from ..viz.demo import Prediction, Speed

_MIN_SPEEDUP = 1.02  # two runs of the same model differ by as much


@click.command(
    "demo",
    cls=Command,
    epilog="""\b
Examples:
  mctf demo
  mctf demo -r 16 --batch 32 --output results --json
  mctf demo --model deit_tiny_patch16_224 --weights tiny.safetensors
""",
)
@click.option("--model", default="embedded", show_default=True, help="A timm name; embedded ships with mctf.")
@click.option("--weights", type=FILE, help="Weights file; pretrained or random weights by default.")
@amount_options("fast")
@click.option("--batch", type=click.IntRange(1, 4096), default=8, show_default=True, help="Batch size when timing.")
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
    r: "ReductionSpec | None",
    flops: float | None,
    schedule: Path | None,
    method: str | None,
    batch: int,
    rounds: int,
    device_name: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Plan, speed-up, predictions and a picture of a fused model on four photographs.

    The photographs ship with scikit-image. The default model is small and ships with its weights (docs/embedded.md).
    For other models trained weights are used where timm has them in its cache or can download them; otherwise weights
    are random, and only cost, speed and picture are meaningful.
    """
    check_folder(output, "--output")

    from ..evaluation.environment import pick_device, versions
    from ..models.loading import RANDOM, load_or_random
    from ..planning import FusionRequest
    from ..viz.contact_sheet import write_png
    from ..viz.demo import WARMUP, Demonstration, photographs

    amounts: dict[str, Any] = {"r": default_r(r, "fast", flops, schedule), "flops": flops, "schedule": schedule}
    FusionRequest.of(method, **amounts, blocks=None, options={})  # before a download
    files, device = photographs(), pick_device(device_name)
    with progress(f"loading {model}"):
        loaded, source = load_or_random(model, weights=weights)
        demonstration = Demonstration.of(loaded, files, method=method, device=device, **amounts)
    show = say_nothing if as_json else echo
    show(f"{demonstration.plan}\n\n{_weights_text(source, classes=demonstration.classes)}")

    with progress("timing", WARMUP + rounds) as advance:
        speed = demonstration.speed(batch=batch, rounds=rounds, after_round=advance)
    show(_speed_text(speed))
    fidelity, predictions = demonstration.predictions()
    show(_fidelity_text(fidelity, predictions, images=len(files), trained=source != RANDOM))
    with progress("drawing", len(demonstration.names)) as advance:
        sheet = demonstration.picture(advance)
    output.mkdir(parents=True, exist_ok=True)
    picture = output / "fused.png"
    write_png(sheet, picture)
    show(f"picture: {picture}")

    facts = {
        "model": model,
        "weights": source,
        "method": demonstration.plan.method,
        "plan": demonstration.plan.as_dict(),
        "speed": asdict(speed),
        "fidelity": asdict(fidelity),
        "predictions": [asdict(each) for each in predictions] if source != RANDOM else None,
        "picture": str(picture),
        "versions": versions(),
    }
    give_json(facts, file=None, as_json=as_json)


def _weights_text(source: str, *, classes: int) -> str:
    from ..models.loading import RANDOM

    if source != RANDOM:
        return f"weights: {source}" + (f", {plural(classes, 'class', 'classes')}" if classes else "")
    return (
        "weights: RANDOM. Pretrained weights are not in the cache and the download\n"
        "failed, so predictions are meaningless; cost, speed and picture are not.\n"
        "Use --weights FILE for real predictions."
    )


def _speed_text(speed: "Speed") -> str:
    from ..evaluation.timing import why_inconclusive

    lines = [
        f"speed: {speed.fused_images_per_second:.1f} images/s fused, {speed.baseline_images_per_second:.1f} baseline: "
        f"{speed.speedup:.2f}x",
        f"  medians over {plural(speed.rounds, 'interleaved round')}, relative spread {speed.spread:.0%},",
        f"  batch {speed.batch}, {speed.dtype}, {speed.device}",
    ]
    busy = why_inconclusive(spread=speed.spread, upper_bound=speed.upper_bound)
    if busy is not None:
        lines.append(f"  {busy}")
    elif speed.speedup < _MIN_SPEEDUP:
        lines.append("  fusing does not pay here: matching costs what the shorter sequence saves;")
        lines.append("  try -r fast (fewer blocks), a larger model, larger images or a larger --batch")
    return "\n".join(lines)


def _fidelity_text(fidelity: "Fidelity", predictions: list["Prediction"], *, images: int, trained: bool) -> str:
    parts = [f"class-token cosine {fidelity.class_cosine:.4f}"]
    if fidelity.kl is not None:
        parts = [f"same top-1 prediction for {fidelity.agreement:.0f} %", f"KL {fidelity.kl:.4f}", *parts]
    lines = [f"fidelity to the baseline on {plural(images, 'photograph')}:", f"  {', '.join(parts)}"]
    if not trained:
        return "\n".join([*lines, "  with random weights: this does not carry over to a trained model"])
    for each in predictions:
        baseline = f"{each.baseline} {each.baseline_probability:.0%}"
        lines.append(f"  {each.photograph:10}{baseline:28} fused: {each.fused} {each.fused_probability:.0%}")
    return "\n".join(lines)
