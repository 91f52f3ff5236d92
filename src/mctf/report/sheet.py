"""A sheet of captioned pictures, one row an image, written to a file all at once or not at all."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from ..errors import MctfError
from ..writing import write_bytes

_PAPER = (255, 255, 255)
_INK = (38, 38, 44)


@dataclass(frozen=True)
class Panel:
    """One picture and the line under it."""

    picture: Image.Image
    caption: str


def make_sheet(rows: Sequence[Sequence[Panel]], *, legend: str = "") -> Image.Image:
    """The panels side by side, row under row, captions centred below; columns as wide as their widest picture.

    legend: a line below them all.
    """
    if not rows or not all(rows):
        raise MctfError("a sheet needs at least one picture in every row")
    widths = [max(row[i].picture.width for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    heights = [max(panel.picture.height for panel in row) for row in rows]
    gap = max(6, min(widths) // 28)
    width = sum(widths) + gap * (len(widths) + 1)
    captions = [(panel.caption, panel.picture.width) for row in rows for panel in row]
    font = _font([*captions, (legend, width - 2 * gap)], largest=min(room for _, room in captions) // 15)
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


def _font(texts: Sequence[tuple[str, int]], *, largest: int) -> ImageFont.FreeTypeFont:
    """Pillow's own font, as large as lets every text fit into its room, given in pixels."""
    size = max(9, largest)
    while size > 6:
        font = ImageFont.load_default(size=size)
        if all(font.getlength(text) <= room for text, room in texts):
            break
        size -= 1
    return ImageFont.load_default(size=size)  # type: ignore[return-value]


def write_png(picture: Image.Image, path: Path) -> None:
    """Write all of it or nothing."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    write_bytes(path, buffer.getvalue())
