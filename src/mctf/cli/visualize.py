"""`mctf visualize`: a picture of which patches were fused."""

import json
from pathlib import Path

import click

from ..errors import MctfError
from ..models.loading import load_described
from .options import (
    FILE,
    blocks_option,
    image_size_option,
    json_option,
    method_option,
    options_option,
    parse_blocks,
    parse_image_size,
    parse_options,
    parse_reduction,
    reduction_option,
    weights_option,
)
from .output import check_writable
from .progress import progress


@click.command(
    "visualize",
    epilog="""\b
Examples:
  mctf visualize cat.jpg --model embedded
  mctf visualize cat.jpg dog.jpg --model deit_tiny_patch16_224 --weights tiny.safetensors --output fused.png
  mctf visualize cat.jpg --model deit_small_patch16_224 -r fast --method tome --show-blocks 3,6,9
""",
)
@click.argument("images", nargs=-1, required=True, type=FILE, metavar="IMAGE…")
@click.option("--model", required=True, help="A timm model, as in deit_small_patch16_224, or hf:NAME.")
@weights_option
@click.option("--random-weights", is_flag=True, help="Run without trained weights.")
@reduction_option("16")
@method_option
@options_option
@blocks_option
@click.option("--show-blocks", metavar="I,J,…", help="Blocks to show; quarters of the depth and the last by default.")
@image_size_option
@click.option("--scale", type=click.IntRange(1, 16), help="Enlargement; 3 by default, more for small images.")
@click.option(
    "--output",
    "-o",
    type=FILE,
    default=Path("fused.png"),
    show_default=True,
    help="PNG to write.",
)
@json_option
def command(
    images: tuple[Path, ...],
    model: str,
    weights: Path | None,
    random_weights: bool,
    reduction: str,
    method: str,
    pairs: tuple[str, ...],
    blocks: str | None,
    show_blocks: str | None,
    image_size: str | None,
    scale: int | None,
    output: Path,
    as_json: bool,
) -> None:
    """Draw each IMAGE as the model sees it, and what its patches became in some blocks, side by side.

    Patches fused into one token share their mean colour and a border; patches that are still alone keep their
    pixels; patches that a method has dropped are grey with stripes. One row an image.
    """
    r, fused_blocks, size = parse_reduction(reduction), parse_blocks(blocks), parse_image_size(image_size)
    shown, options = parse_blocks(show_blocks, option="--show-blocks"), parse_options(pairs)
    _check_output(output)

    from ..api import fuse
    from ..data import Preprocessing
    from ..hosts import find_host
    from ..planning import plan
    from ..viz.contact_sheet import choose_blocks, contact_sheet, write_png
    from ..viz.fused_patches import open_image

    opened = [open_image(path) for path in images]
    loaded, source = load_described(model, weights=weights, random=random_weights, image_size=size)
    chosen = choose_blocks(shown, find_host(loaded).depth)
    counts = plan(loaded, r=r, method=method, blocks=fused_blocks, **options).token_counts
    fuse(loaded, method, r=r, blocks=fused_blocks, **options)
    preprocessing = Preprocessing.of(loaded)
    transform = preprocessing.transform()
    with progress("drawing", len(opened)) as advance:
        inputs = [transform(image) for image in opened]
        sheet = contact_sheet(loaded, inputs, preprocessing, blocks=chosen, scale=scale, after_image=advance)
    write_png(sheet, output)

    facts = {
        "output": str(output),
        "images": [str(path) for path in images],
        "model": model,
        "weights": source,
        "method": method,
        "r": r,
        "blocks": [{"block": block, "tokens": counts[block]} for block in chosen],
    }
    click.echo(json.dumps(facts, indent=2) if as_json else output)


def _check_output(path: Path) -> None:
    if path.suffix.lower() != ".png":
        raise MctfError(f"the picture is a PNG: name it {path.stem}.png, not {path.name}")
    check_writable(path)
