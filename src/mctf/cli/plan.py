"""`mctf plan`: token counts and GFLOPs, without running the model."""

import json

import click

from .options import (
    blocks_option,
    image_size_option,
    json_option,
    method_option,
    options_option,
    parse_blocks,
    parse_image_size,
    parse_options,
    parse_reduction,
)


@click.command(
    "plan",
    epilog="""\b
Examples:
  mctf plan deit_small_patch16_224
  mctf plan deit_small_patch16_224 -r fast
  mctf plan vit_base_patch16_siglip_384 -r 0.1 --method tome --json
  mctf plan hf:facebook/dinov2-base -r 16
""",
)
@click.argument("model")
@click.option("-r", "reduction", help="Tokens to fuse a block: 16, 0.35 or fast; as the method's authors by default.")
@method_option
@options_option
@blocks_option
@image_size_option
@json_option
def command(
    model: str,
    reduction: str | None,
    method: str,
    pairs: tuple[str, ...],
    blocks: str | None,
    image_size: str | None,
    as_json: bool,
) -> None:
    """Token counts and GFLOPs of MODEL, block by block, without running it.

    MODEL is a name of timm's, or hf: and a name or a saved directory of transformers'.
    """
    from ..planning import plan

    result = plan(
        model,
        r=None if reduction is None else parse_reduction(reduction),
        method=method,
        blocks=parse_blocks(blocks),
        image_size=parse_image_size(image_size),
        **parse_options(pairs),
    )
    click.echo(json.dumps(result.as_dict(), indent=2) if as_json else str(result))
