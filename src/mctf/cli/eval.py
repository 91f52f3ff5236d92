"""`mctf eval`: accuracy, fidelity and speed over several r, all measured in one run."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import MctfError
from .options import NAMES, REDUCTIONS, blocks_option, options_option, parse_options, run_options
from .output import check_outputs, give_json
from .progress import Command, open_run, progress

if TYPE_CHECKING:
    from ..core.schedule import ReductionSpec
    from ..evaluation.evaluate import Setting


@click.command(
    "eval",
    cls=Command,
    epilog="""\b
Examples:
  mctf eval deit_small_patch16_224 --data imagenet/val
  mctf eval deit_small_patch16_224 --data photos.zip -r 8,16,fast --limit 500
  mctf eval deit_tiny_patch16_224 --data val.zip \\
      --weights tiny.safetensors --classes classes.tsv \\
      -r 0,16 --method mctf,tome --json
  torchrun --nproc-per-node 8 -m mctf eval deit_base_patch16_224 \\
      --data imagenet/val
""",
)
@click.argument("model")
@click.option(
    "-r", "reductions", type=REDUCTIONS, default="0,4,8,12,16,20", show_default=True, help="Tokens to fuse per block."
)
@click.option(
    "--method", "-m", "methods", type=NAMES, default="mctf", show_default=True, help="Methods, as in mctf,tome."
)
@options_option
@blocks_option
@run_options
def command(
    reductions: list["ReductionSpec"],
    methods: list[str],
    pairs: tuple[str, ...],
    blocks: tuple[int, ...] | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Top-1, top-5, fidelity, GFLOPs and images/s of MODEL (a timm name, or hf:NAME).

    Agreement, KL and class-token cosine compare with the unfused model and need no labels. Mean, std, crop and
    interpolation are those of the model. Every batch runs through all settings in turn. Under torchrun the ranks share
    the images; each image counts once. --json adds the standard error of each KL, kl_error.
    """
    check_outputs(output, inputs=(options["data"], options["weights"], options["classes"]))
    settings = _settings(methods, reductions, blocks, pairs)

    from ..evaluation.evaluate import evaluate, passes
    from ..evaluation.setup import RunOptions

    with open_run(RunOptions(**options)) as run:
        steps = len(run.batches) * passes(settings)
        with progress("evaluating", steps, wanted=run.options.progress) as tick:
            evaluation = evaluate(run.model, run.batches, settings, tick=tick)
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


def _settings(
    methods: Sequence[str],
    reductions: Sequence["ReductionSpec"],
    blocks: tuple[int, ...] | None,
    pairs: Sequence[str],
) -> list["Setting"]:
    """Every method with every r, each once; refuses methods and options before anything is loaded."""
    from ..evaluation.evaluate import Setting
    from ..methods import make_method

    if not methods:
        raise MctfError("there is nothing to evaluate: name at least one method (--method mctf)")
    if pairs and len(set(methods)) > 1:
        raise MctfError("--option belongs to one method: evaluate methods with options one by one")
    options = parse_options(pairs)
    settings: list[Setting] = []
    for name in methods:
        make_method(name, options)
        for r in reductions:
            setting = Setting(name, r, blocks, tuple(options.items()))
            if setting not in settings:  # by equality: the value of an option may be a list
                settings.append(setting)
    return settings
