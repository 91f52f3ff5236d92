"""`mctf eval`: accuracy, fidelity and speed over several r, all measured in one run."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import MctfError
from ..evaluation.setup import Measuring, measuring_options, title_of
from .options import blocks_option, options_option, parse_blocks, parse_names, parse_options, parse_reductions
from .output import check_writable, give_json
from .progress import progress, ticking

if TYPE_CHECKING:
    from ..evaluation.evaluate import Row, Setting


@click.command(
    "eval",
    epilog="""\b
Examples:
  mctf eval deit_small_patch16_224 --data imagenet/val
  mctf eval deit_small_patch16_224 --data photos.zip -r 8,16,fast --limit 500
  mctf eval deit_tiny_patch16_224 --data val.zip --weights tiny.safetensors \\
      --classes classes.tsv -r 0,16 --method mctf,tome --json
  torchrun --nproc-per-node 8 -m mctf eval deit_base_patch16_224 --data imagenet/val
""",
)
@click.argument("model")
@click.option("-r", "reductions", default="0,4,8,12,16,20", show_default=True, help="Tokens to fuse a block.")
@click.option("--method", "-m", "methods", default="mctf", show_default=True, help="Methods, as in mctf,tome.")
@options_option
@blocks_option
@measuring_options
def command(
    reductions: str,
    methods: str,
    pairs: tuple[str, ...],
    blocks: str | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Top-1, top-5, fidelity to the unfused model, images/s and GFLOPs of MODEL: a timm name, or hf:NAME.

    Agreement, KL and class-token cosine compare with the unfused model and need no labels. Mean, std, crop and
    interpolation are the model's own. Every batch runs through all settings in turn. Under torchrun the processes
    share the images, each of which counts once. With --json each KL has its standard error, kl_error.
    """
    if output is not None:
        check_writable(output)
    facts, rows = _evaluate(Measuring(**options), _settings(methods, reductions, parse_blocks(blocks), pairs))
    if facts is None:  # another process speaks for all
        return
    give_json(facts | {"rows": [asdict(row) for row in rows]}, file=output, as_json=as_json)
    if as_json:
        return
    from .tables import print_rows

    print_rows(rows, title=title_of(facts), notes=facts["notes"])


def _evaluate(measuring: Measuring, settings: list["Setting"]) -> tuple[dict[str, Any] | None, tuple["Row", ...]]:
    """What the JSON object says beside its rows, and the rows; None for it in all processes but the first."""
    from ..evaluation.evaluate import evaluate

    with measuring.open() as subject:
        first, batches = subject.processes.is_main, subject.batches
        with progress("batches", len(batches), wanted=measuring.progress if first else False) as tick:
            result = evaluate(subject.model, ticking(batches, tick), settings)
    if not first:
        return None, ()
    facts = measuring.facts(subject, images=result.images)
    return facts | {"notes": [*subject.dataset.notes, *result.notes]}, result.rows


def _settings(methods: str, reductions: str, blocks: tuple[int, ...] | None, pairs: Sequence[str]) -> list["Setting"]:
    """Every method with every r, each pair once; pairs: options of the method, where there is one."""
    from ..evaluation.evaluate import Setting

    names = parse_names(methods)
    amounts = parse_reductions(reductions)
    if not names or not amounts:
        raise MctfError("there is nothing to evaluate: name at least one r (-r 16) and one method (--method mctf)")
    if pairs and len(set(names)) > 1:
        raise MctfError("--option speaks of one method: evaluate methods with options one by one")
    options = tuple(parse_options(pairs).items())
    return list(dict.fromkeys(Setting(name, r, blocks, options) for name in names for r in amounts))
