"""`mctf visualize`: a picture of which patches were fused."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import MctfError
from .options import (
    BLOCKS,
    FILE,
    amount_options,
    blocks_option,
    default_r,
    image_size_option,
    json_option,
    limits_options,
    options_option,
    parse_options,
    weights_option,
)
from .output import check_outputs
from .progress import Command, progress

if TYPE_CHECKING:
    from ..core.schedule import ReductionSpec


@click.command(
    "visualize",
    cls=Command,
    epilog="""\b
Examples:
  mctf visualize cat.jpg --model embedded
  mctf visualize cat.jpg dog.jpg --model deit_tiny_patch16_224 \\
      --weights tiny.safetensors --output fused.png
  mctf visualize cat.jpg --model deit_small_patch16_224 -r fast \\
      --method tome --show-blocks 3,6,9
""",
)
@click.argument("images", nargs=-1, required=True, type=FILE, metavar="IMAGE…")
@click.option("--model", required=True, help="A timm name, as in deit_small_patch16_224, or hf:NAME.")
@weights_option
@click.option("--random-weights", is_flag=True, help="Run without trained weights.")
@amount_options("16")
@options_option
@blocks_option
@click.option("--show-blocks", type=BLOCKS, help="Blocks to show; by default at each quarter of the depth.")
@image_size_option
@limits_options
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
    r: "ReductionSpec | None",
    flops: float | None,
    schedule: Path | None,
    method: str | None,
    pairs: tuple[str, ...],
    blocks: tuple[int, ...] | None,
    show_blocks: tuple[int, ...] | None,
    image_size: tuple[int, int] | None,
    scale: int | None,
    output: Path,
    as_json: bool,
    **limits: Any,
) -> None:
    """Draw each IMAGE as the model sees it, beside its fused patches.

    One row per image, one column per block. Patches fused into one token share their mean color and a border. Patches
    that are still separate keep their pixels. Dropped patches are gray with stripes.
    """
    options = parse_options(pairs)
    if output.suffix.lower() != ".png":
        raise MctfError(f"the picture is a PNG: name it {output.stem}.png, not {output.name}")
    check_outputs(output, inputs=(*images, weights, schedule))

    from ..api import fuse
    from ..data import Preprocessing, ReadLimits
    from ..hosts import find_host
    from ..models.loading import load_described
    from ..planning import FusionRequest, plan
    from ..viz.contact_sheet import choose_blocks, contact_sheet, write_png
    from ..viz.fused_patches import open_image

    amounts: dict[str, Any] = {"flops": flops, "schedule": schedule, "blocks": blocks}
    amounts["r"] = default_r(r, 16, flops, schedule)
    FusionRequest.of(method, **amounts, options=options)  # before a download
    read_limits = ReadLimits.of(**limits)
    opened = [open_image(path, read_limits) for path in images]
    loaded, source = load_described(model, weights=weights, random=random_weights, image_size=image_size)
    chosen = choose_blocks(show_blocks, find_host(loaded).depth)
    planned = plan(loaded, method=method, **amounts, **options)
    fuse(loaded, method, **amounts, **options)
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
        "method": planned.method,
        "r": planned.r,
        "blocks": [{"block": block, "tokens": planned.token_counts[block]} for block in chosen],
    }
    click.echo(json.dumps(facts, indent=2) if as_json else output)
