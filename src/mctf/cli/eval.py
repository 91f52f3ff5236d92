"""`mctf eval`: accuracy, fidelity and speed over several r, all measured in one run."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import MctfError
from .options import (
    FILE,
    NAMES,
    REDUCTIONS,
    FiniteRange,
    blocks_option,
    budgets_option,
    calibration_option,
    options_option,
    parse_options,
    quantized_precisions,
    run_options,
    trim_last_option,
)
from .output import check_outputs, give_json
from .progress import Command, open_run, progress

if TYPE_CHECKING:
    from torch import nn

    from ..core.schedule import ReductionSpec
    from ..evaluation.evaluate import Setting
    from ..planning import FusionRequest

_REDUCTIONS = (0, 4, 8, 12, 16, 20)


@click.command(
    "eval",
    cls=Command,
    epilog="""\b
Examples:
  mctf eval deit_small_patch16_224 --data imagenet/val
  mctf eval deit_small_patch16_224 --data photos.zip -r 8,16,fast --limit 500
  mctf eval deit_small_patch16_224 --data imagenet/val \\
      --method ward,mctf --flops 0.56,0.67
  mctf eval deit_tiny_patch16_224 --data val.zip \\
      --weights tiny.safetensors --classes classes.tsv \\
      -r 0,16 --method mctf,tome --json
  mctf eval deit_small_patch16_224 --data imagenet/val \\
      --method ward --flops 0.58 --dense
  mctf eval deit_small_patch16_224 --data imagenet/val \\
      --method ward --flops 0.56 --precision fp8 \\
      --calibration photos.zip --max-kl 0.002
  torchrun --nproc-per-node 8 -m mctf eval deit_base_patch16_224 \\
      --data imagenet/val
""",
)
@click.argument("model")
@click.option("-r", "reductions", type=REDUCTIONS, help="Tokens to fuse per block; 0,4,8,12,16,20 by default.")
@budgets_option
@click.option("--schedule", "schedules", type=FILE, multiple=True, help="A schedule that mctf tune wrote; repeatable.")
@click.option("--method", "-m", "methods", type=NAMES, help="Methods, as in mctf,tome; mctf by default.")
@options_option
@blocks_option
@trim_last_option
@click.option("--dense", is_flag=True, help="One token per input token: adds the cosine of the patches.")
@click.option(
    "--restore",
    type=click.Choice(("residual", "copy")),
    default="residual",
    show_default=True,
    help="How tokens that were fused are restored where every token is read.",
)
@click.option(
    "--precision",
    "precisions",
    type=NAMES,
    help="Also every row quantized: fp8 (GPUs; emulated elsewhere) or int8 (CPUs).",
)
@calibration_option
@click.option(
    "--max-kl",
    type=FiniteRange(0),
    help="KL that quantizing may add on the calibration images; the most sensitive layers keep their dtype.",
)
@run_options
def command(
    reductions: list["ReductionSpec"] | None,
    budgets: list[float] | None,
    schedules: tuple[Path, ...],
    methods: list[str] | None,
    pairs: tuple[str, ...],
    blocks: tuple[int, ...] | None,
    trim_last: bool | None,
    dense: bool,
    restore: str,
    precisions: list[str] | None,
    calibration: str | None,
    max_kl: float | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Top-1, top-5, fidelity, GFLOPs and images/s of MODEL (a timm name, hf:NAME, or a file of mctf export).

    Agreement, KL and class-token cosine compare with the unfused model and need no labels. So does the cosine of the
    patches, for models that give one token per input token: those that pool all of them, and all with --dense. Mean,
    std, crop and interpolation are those of the model. Every batch runs through all settings in turn. Under torchrun
    the ranks share the images; each image counts once. --json adds the standard error of each KL, kl_error.

    --precision quantizes the linear layers of the blocks, see mctf.quantize, and prints the KL that this adds to each
    row.
    """
    check_outputs(output, inputs=(options["data"], options["weights"], options["classes"], *schedules))
    from ..deploy.exported import is_exported

    if is_exported(options["model"]):
        refused = {
            "-r": reductions,
            "--flops": budgets,
            "--schedule": schedules or None,
            "--method": methods,
            "--option": pairs or None,
            "--blocks": blocks,
            "--trim-last": trim_last,
            "--dense": dense or None,
            "--restore": None if restore == "residual" else restore,
            "--precision": precisions,
            "--calibration": calibration,
            "--max-kl": max_kl,
        }
        given = [name for name, value in refused.items() if value is not None]
        if given:
            raise MctfError(f"{options['model']} is exported as it is fused: leave out {', '.join(given)}")
        _evaluate_file(options, output=output, as_json=as_json)
        return
    requests = _requests(methods, reductions, budgets, schedules, blocks, pairs)
    quantized = quantized_precisions(precisions, options["dtype"])
    if not quantized and (calibration is not None or max_kl is not None):
        raise MctfError("--calibration and --max-kl are for quantized rows: add --precision fp8 or int8")
    if ("fp8" in quantized or max_kl is not None) and calibration is None:
        raise MctfError("fp8 and --max-kl need images beside those of --data: add --calibration IMAGES")

    from ..evaluation.evaluate import evaluate, passes
    from ..evaluation.setup import RunOptions
    from ..quantization import QuantizationRequest

    with open_run(RunOptions(**options)) as run:
        reading = {"dense": dense, "trim_last": trim_last, "restore": restore}
        settings = _settings(run.model, requests, blocks, parse_options(pairs), reading)
        images = None if calibration is None else run.calibration(calibration)
        quantizations = [QuantizationRequest(name, images, max_kl) for name in quantized]
        steps = len(run.batches) * passes(settings, len(quantizations))
        with progress("evaluating", steps, wanted=run.options.progress) as tick:
            evaluation = evaluate(run.model, run.batches, settings, quantizations=quantizations, tick=tick)
    if not run.distributed.is_main:  # only rank 0 reports
        return
    facts = {
        **run.facts(images=evaluation.images),
        "notes": [*run.notes(images=evaluation.images), *evaluation.notes],
        "rows": [asdict(row) for row in evaluation.rows],
    }
    give_json(facts, file=output, as_json=as_json)
    if not as_json:
        from .tables import print_rows, run_title

        print_rows(evaluation.rows, title=run_title(facts), notes=facts["notes"])


def _evaluate_file(options: dict[str, Any], *, output: Path | None, as_json: bool) -> None:
    """Evaluate an exported file."""
    from ..deploy.evaluate import evaluate_exported
    from ..evaluation.setup import RunOptions

    run = RunOptions(**options)
    with progress(f"evaluating {run.model}", wanted=run.progress) as tick:
        row, facts = evaluate_exported(run, tick=tick)
    give_json(facts, file=output, as_json=as_json)
    if not as_json:
        from .tables import print_rows, run_title

        print_rows([row], title=run_title(facts), notes=facts["notes"])


def _requests(
    methods: Sequence[str] | None,
    reductions: "Sequence[ReductionSpec] | None",
    budgets: Sequence[float] | None,
    schedules: Sequence[Path],
    blocks: tuple[int, ...] | None,
    pairs: Sequence[str],
) -> list[tuple[str, "FusionRequest"]]:
    """Every method with every r or budget, and every schedule, each with its name in the table.

    Refuses methods, options and schedules before anything is loaded.
    """
    from ..planning import DEFAULT_METHOD, FusionRequest

    if reductions is not None and budgets is not None:
        raise MctfError("-r and --flops both say how much to fuse: give one of them")
    options = parse_options(pairs)
    requests = []
    for path in schedules:
        request = FusionRequest.of(None, r=None, flops=None, blocks=blocks, schedule=path, options=options)
        requests.append((f"{request.method.name} ({path.stem})", request))
    if schedules and methods is None and reductions is None and budgets is None:
        return requests
    methods = [DEFAULT_METHOD] if methods is None else methods
    if not methods:
        raise MctfError("there is nothing to evaluate: name at least one method (--method mctf)")
    if pairs and len(set(methods)) > 1:
        raise MctfError("--option belongs to one method: evaluate methods with options one by one")
    amounts = [(r, None) for r in (_REDUCTIONS if reductions is None else reductions)]
    for name in dict.fromkeys(methods):
        for r, flops in amounts if budgets is None else [(None, budget) for budget in budgets]:
            request = FusionRequest.of(name, r=r, flops=flops, blocks=blocks, schedule=None, options=options)
            requests.append((name, request))
    return requests


def _settings(
    model: "nn.Module",
    requests: "Sequence[tuple[str, FusionRequest]]",
    blocks: tuple[int, ...] | None,
    options: dict[str, Any],
    reading: dict[str, Any],
) -> list["Setting"]:
    """What the requests come to on a model, each once. reading: which tokens are read, and how, see `Setting`."""
    from ..evaluation.evaluate import Setting

    settings: list[Setting] = []
    for name, request in requests:
        if request.r is not None and request.schedule is None:
            setting = Setting(name, request.r, blocks, tuple(options.items()), **reading)
        else:
            own = options if request.schedule is None else request.schedule.options
            setting = Setting.of(request, model, options=own, label=name if request.schedule else "", **reading)
        if setting not in settings:  # by equality: the value of an option may be a list
            settings.append(setting)
    return settings
