"""`mctf demo`: token fusion on this machine, without downloads, in one screen."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._utils import plural
from .options import FILE, amount_options, device_option, json_option
from .output import check_folder, echo, give_json, program, say_nothing, width
from .progress import Command, progress

if TYPE_CHECKING:
    from ..core.schedule import ReductionSpec
    from ..evaluation.fidelity import Fidelity
    from ..viz.demo import Demonstration, Prediction, Speed

_METHOD, _FLOPS = "ward", 0.56
_PICTURE_LINES = 12
_MIN_SPEEDUP = 1.02  # two runs of the same model differ by as much


@click.command(
    "demo",
    cls=Command,
    epilog="""\b
Examples:
  mctf demo
  mctf demo --method mctf --flops 0.67
  mctf demo -r 0.2 --batch 32 --output results --json
  mctf demo --model deit_tiny_patch16_224 --weights tiny.safetensors
""",
)
@click.option("--model", default="embedded", show_default=True, help="A timm name; embedded ships with mctf.")
@click.option("--weights", type=FILE, help="Weights file; pretrained or random weights by default.")
@amount_options("--flops 0.56", method=_METHOD)
@click.option("--batch", type=click.IntRange(1, 4096), default=8, show_default=True, help="Batch size when timing.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds of timing.")
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
    """Answers, cost and measured speed of a model, unfused and fused, on photographs.

    The photographs ship with scikit-image and gradio. The default model ships with its weights (docs/embedded.md).
    For other models trained weights are used where timm has them in its cache or can download them; otherwise weights
    are random, and only cost, speed and picture are meaningful. A terminal that can show pictures shows one.
    """
    check_folder(output, "--output")

    from ..evaluation.environment import pick_device, versions
    from ..models.loading import RANDOM, load_or_random
    from ..planning import FusionRequest
    from ..viz.contact_sheet import write_png
    from ..viz.demo import WARMUP, Demonstration, photographs

    if schedule is None:
        method = _METHOD if method is None else method
        flops = _FLOPS if r is None and flops is None else flops
    amounts: dict[str, Any] = {"r": r, "flops": flops, "schedule": schedule}
    FusionRequest.of(method, **amounts, blocks=None, options={})  # before a download
    shown, device = photographs(), pick_device(device_name)
    with progress(f"loading {model}"):
        loaded, source = load_or_random(model, weights=weights)
        demonstration = Demonstration.of(loaded, shown, method=method, device=device, **amounts)
    trained, show = source != RANDOM, say_nothing if as_json else echo
    fused = demonstration.plan.method
    show(f"{model} on this machine, unfused and with tokens fused by {fused}:\n")
    if not as_json:
        _show_picture(demonstration)
    fidelity, predictions = demonstration.predictions()
    show(_answers_text(predictions if trained else [], fused=fused, source=source))
    show(_saving_text(demonstration))
    with progress("timing", WARMUP + rounds) as advance:
        speed = demonstration.speed(batch=batch, rounds=rounds, after_round=advance)
    show(_speed_text(speed))
    show(_fidelity_text(fidelity, images=len(shown), trained=trained))
    with progress("drawing", len(demonstration.names)) as advance:
        sheet = demonstration.picture(advance)
    output.mkdir(parents=True, exist_ok=True)
    picture = output / "fused.png"
    write_png(sheet, picture)
    show(f"picture   {picture}\n")
    if not as_json:
        click.echo(_next_text(model, weights))  # not wrapped: commands to be pasted

    facts = {
        "model": model,
        "weights": source,
        "method": demonstration.plan.method,
        "plan": demonstration.plan.as_dict(),
        "speed": asdict(speed),
        "fidelity": asdict(fidelity),
        "predictions": [asdict(each) for each in predictions] if trained else None,
        "picture": str(picture),
        "versions": versions(),
    }
    give_json(facts, file=None, as_json=as_json)


def _show_picture(demonstration: "Demonstration") -> None:
    """The first photograph and its fused patches, where the terminal shows pictures."""
    from ..viz.contact_sheet import make_sheet
    from .terminal_image import Protocol, detect, encode

    protocol = detect()
    side = 2 * _PICTURE_LINES
    if protocol is Protocol.BLOCKS and width() >= 3 * side + 4:
        row = demonstration.strip(side=side)
        texts = [encode(panel.picture, protocol, lines=_PICTURE_LINES).splitlines() for panel in row]
        click.echo("\n".join("  ".join(parts) for parts in zip(*texts, strict=True)), color=True)
        click.echo("  ".join(panel.caption.center(side) for panel in row).rstrip() + "\n")
    elif protocol in (Protocol.KITTY, Protocol.ITERM, Protocol.SIXEL):
        click.echo(encode(make_sheet([demonstration.strip()]), protocol, lines=_PICTURE_LINES), color=True)


def _answers_text(predictions: list["Prediction"], *, fused: str, source: str) -> str:
    """Both answers for every photograph; that weights are random, or nothing for a model without classes."""
    from ..models.loading import RANDOM

    if source == RANDOM:
        return (
            "weights   RANDOM: pretrained weights are not in the cache and the download failed.\n"
            "          Answers are meaningless; cost, speed and picture are not.\n"
            "          Use --weights FILE for real answers.\n"
        )
    if not predictions:
        return f"weights   {source}; the model has no classes\n"
    rows = [("photograph", "unfused", f"fused by {fused}")]
    for each in predictions:
        before = f"{each.baseline:.22} {each.baseline_probability:.0%}"
        rows.append((each.photograph, before, f"{each.fused:.22} {each.fused_probability:.0%}"))
    widths = [max(map(len, column)) + 3 for column in zip(*rows, strict=True)]
    lines = ["".join(f"{cell:{size}}" for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, ""])


def _saving_text(demonstration: "Demonstration") -> str:
    planned = demonstration.plan
    share = planned.gflops / planned.gflops_base
    return (
        f"FLOPs     {planned.gflops_base:.2f} -> {planned.gflops:.2f} G per image: {1 - share:.0%} saved; "
        f"tokens {planned.image_tokens} -> {planned.token_counts[-1]}"
    )


def _speed_text(speed: "Speed") -> str:
    from ..evaluation.timing import why_inconclusive

    lines = [
        f"speed     {speed.baseline_images_per_second:.1f} -> {speed.fused_images_per_second:.1f} images/s: "
        f"{speed.speedup:.2f}x, spread {speed.spread:.0%}",
        f"          medians of {plural(speed.rounds, 'interleaved round')}, batch {speed.batch}, {speed.dtype}, "
        f"{speed.device}",
    ]
    busy = why_inconclusive(spread=speed.spread, upper_bound=speed.upper_bound)
    if busy is not None:
        lines.append(f"          {busy}")
    elif speed.speedup < _MIN_SPEEDUP:
        lines.append("          fusing does not pay here: matching costs what the shorter sequence saves;")
        lines.append("          try a larger model, larger images or a larger --batch")
    return "\n".join(lines)


def _fidelity_text(fidelity: "Fidelity", *, images: int, trained: bool) -> str:
    parts = [f"class-token cosine {fidelity.class_cosine:.4f}"]
    if fidelity.kl is not None and fidelity.agreement is not None:
        same = round(fidelity.agreement * images / 100)
        parts = [f"same answer for {same} of {plural(images, 'photograph')}", f"KL {fidelity.kl:.4f}", *parts]
    text = f"fidelity  {', '.join(parts)}"
    return text if trained else f"{text}\n          with random weights: this does not carry over to a trained model"


def _next_text(model: str, weights: Path | None) -> str:
    """What to type next."""
    options = model if weights is None else f"{model} --weights {shlex.quote(str(weights))}"
    setting = f"--method {_METHOD} --flops {_FLOPS}"
    own = "" if model == "embedded" else f" --model {options}"
    mctf = program()
    return (
        f"next      {mctf} playground{own}   # in the browser, with your photographs\n"
        f"          {mctf} visualize PHOTO --model {options} {setting}\n"
        f"          {mctf} eval {options} --data FOLDER {setting}"
    )
