"""`mctf plan`: token counts and GFLOPs, without running the model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import (
    amount_options,
    blocks_option,
    image_size_option,
    json_option,
    options_option,
    parse_options,
    trim_last_option,
)
from .output import echo
from .progress import Command

if TYPE_CHECKING:
    from ..core.schedule import ReductionSpec


@click.command(
    "plan",
    cls=Command,
    epilog="""\b
Examples:
  mctf plan deit_small_patch16_224
  mctf plan deit_small_patch16_224 -r fast
  mctf plan deit_small_patch16_224 --method ward --flops 0.56
  mctf plan vit_base_patch16_siglip_384 -r 0.1 --method tome --json
  mctf plan hf:facebook/dinov2-base -r 16
""",
)
@click.argument("model")
@amount_options(None)
@options_option
@blocks_option
@trim_last_option
@image_size_option
@json_option
def command(
    model: str,
    r: "ReductionSpec | None",
    flops: float | None,
    schedule: Path | None,
    method: str | None,
    pairs: tuple[str, ...],
    blocks: tuple[int, ...] | None,
    trim_last: bool | None,
    image_size: tuple[int, int] | None,
    as_json: bool,
) -> None:
    """Token counts and GFLOPs of MODEL per block, without running it.

    MODEL is a timm name, or hf: and a name or a saved directory of transformers.
    """
    from ..planning import plan

    result = plan(
        model,
        r=r,
        flops=flops,
        schedule=schedule,
        method=method,
        blocks=blocks,
        trim_last=trim_last,
        image_size=image_size,
        **parse_options(pairs),
    )
    if as_json:
        click.echo(json.dumps(result.as_dict(), indent=2))
    else:
        echo(result)
