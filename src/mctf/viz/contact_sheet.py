"""Contact sheets: one row per image, with the model's input and its fused patches after some blocks.

Axes: B images, 3 H W; N tokens.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from .._utils import atomic_write, plural
from ..api import fused_stack
from ..core.schedule import fast_blocks
from ..data import Preprocessing
from ..errors import MctfError
from ..tracing import trace
from .fused_patches import enlarge, fused_picture, patch_grid, to_image

_SCALE = 3
_SIDE = 448  # pixels of a picture's shorter side below which patches of small images are hard to distinguish
_LEGEND = "striped gray: dropped, input of no later block"
_PAPER = (255, 255, 255)
_INK = (38, 38, 44)


def choose_blocks(blocks: Sequence[int] | None, depth: int) -> tuple[int, ...]:
    """The blocks to show, checked; by default those at a quarter, half and three quarters, and the last."""
    if blocks is None:
        return tuple(sorted({*fast_blocks(depth), depth - 1}))
    for block in blocks:
        if not 0 <= block < depth:
            raise MctfError(f"there is no block {block} to show: the model has blocks 0 to {depth - 1}")
    return tuple(blocks)


def contact_sheet(
    model: nn.Module,
    inputs: Sequence[Tensor],
    preprocessing: Preprocessing,
    *,
    blocks: Sequence[int],
    scale: int | None = None,
    after_image: Callable[[], object] = lambda: None,
) -> Image.Image:
    """A sheet with one row per input (3 H W) of a fused model: the crop, then its patches after each of the blocks.

    Where a method drops patches, captions count them and a legend explains their pattern.
    scale: picture pixels per image pixel; by default 3, and more for small images.
    """
    scale = scale or max(_SCALE, math.ceil(_SIDE / min(preprocessing.image_size)))
    rows, any_dropped = [], False
    for tensor in inputs:
        row = panels(model, tensor, preprocessing, blocks=blocks, scale=scale)
        rows.append(row)
        any_dropped |= any(panel.dropped for panel in row)
        after_image()
    return make_sheet(rows, legend=_LEGEND if any_dropped else "")


@dataclass(frozen=True)
class Panel:
    """One picture and the line under it. dropped: number of patches that were dropped."""

    picture: Image.Image
    caption: str
    dropped: int = 0


def panels(
    model: nn.Module,
    tensor: Tensor,
    preprocessing: Preprocessing,
    *,
    blocks: Sequence[int],
    scale: int,
    borders: bool = True,
) -> list[Panel]:
    """The input (3 H W) of a fused model, then its patches after each of the blocks. borders: as of `fused_picture`."""
    weight, prefix = next(model.parameters()), fused_stack(model).host.protected
    with torch.inference_mode(), trace(model) as traced:
        model(tensor[None].to(weight.device, weight.dtype))
    image, tokens = to_image(tensor, preprocessing), traced.source_map().shape[1]
    grid = patch_grid(tokens - prefix, height=image.height, width=image.width)
    row = [Panel(enlarge(image, scale), f"input: {plural(tokens, 'token')}")]
    for block in blocks:
        maps = traced.source_map(block), traced.dropped(block)
        slots, dropped = (each[0, prefix:].cpu().numpy() for each in maps)
        caption = f"block {block}: {plural(traced.token_counts[block], 'token')}"
        caption += f", {dropped.sum()} dropped" if dropped.any() else ""
        picture = fused_picture(image, slots, grid=grid, dropped=dropped, scale=scale, borders=borders)
        row.append(Panel(picture, caption, int(dropped.sum())))
    return row


def make_sheet(rows: Sequence[Sequence[Panel]], *, legend: str = "") -> Image.Image:
    """The panels in rows, captions centered below them; columns are as wide as their widest picture.

    legend: a line below all rows.
    """
    if not rows or not all(rows):
        raise MctfError("a sheet needs at least one picture in every row")
    widths = [max(row[i].picture.width for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    heights = [max(panel.picture.height for panel in row) for row in rows]
    gap = max(6, min(widths) // 28)
    width = sum(widths) + gap * (len(widths) + 1)
    captions = [(panel.caption, panel.picture.width) for row in rows for panel in row]
    font = _fitting_font([*captions, (legend, width - 2 * gap)], largest=min(room for _, room in captions) // 15)
    line = round(font.size * 1.9)
    below = line if legend else 0

    canvas = Image.new("RGB", (width, sum(heights) + (gap + line) * len(rows) + below), _PAPER)
    draw = ImageDraw.Draw(canvas)
    top = gap
    for row, height in zip(rows, heights, strict=True):
        left = gap
        for panel, width in zip(row, widths, strict=False):
            canvas.paste(panel.picture, (left + (width - panel.picture.width) // 2, top))
            draw.text((left + width / 2, top + height + line / 2), panel.caption, fill=_INK, font=font, anchor="mm")
            left += width + gap
        top += height + line + gap
    draw.text((gap, top - gap + below / 2), legend, fill=_INK, font=font, anchor="lm")
    return canvas


def _fitting_font(texts: Sequence[tuple[str, int]], *, largest: int) -> ImageFont.FreeTypeFont:
    """Pillow's font in the largest size at which every text fits its width in pixels."""
    size = max(9, largest)
    while size > 6:
        font = ImageFont.load_default(size=size)
        if all(font.getlength(text) <= room for text, room in texts):
            break
        size -= 1
    return ImageFont.load_default(size=size)  # type: ignore[return-value]


def write_png(picture: Image.Image, path: Path) -> None:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    atomic_write(path, buffer.getvalue())
