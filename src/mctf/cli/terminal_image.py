"""A picture inside the terminal: by the protocols of kitty, iTerm2 or sixel, or by half-block characters in color.

What a terminal can is read from the environment: asking it would need an answer that not every terminal gives.

Axes: H W pixels; a character cell shows two pixels, one above the other, where half blocks are used.
"""

import base64
import io
import os
import sys
from collections.abc import Mapping
from enum import StrEnum

import numpy as np
from PIL import Image

_CHUNK = 4096  # bytes of base64 per escape sequence of kitty
_CELL = 20  # assumed pixels of a line of text, for sixel, which counts in pixels
_COLORS = 128  # of a sixel picture
_BAND = 6  # rows of pixels that one line of sixels holds


class Protocol(StrEnum):
    """How a terminal shows pictures."""

    KITTY = "kitty"
    ITERM = "iterm"
    SIXEL = "sixel"
    BLOCKS = "blocks"


def detect(environment: Mapping[str, str] = os.environ, *, terminal: bool | None = None) -> Protocol | None:
    """The protocol of the terminal behind stdout; None where there is no terminal, or none that shows colors.

    Multiplexers (tmux, screen) swallow the protocols for pixels and pass colors on.
    """
    if not (sys.stdout.isatty() if terminal is None else terminal) or "NO_COLOR" in environment:
        return None
    term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    if term == "dumb":
        return None
    if "TMUX" not in environment and not term.startswith(("screen", "tmux")):
        if "kitty" in term or "KITTY_WINDOW_ID" in environment or "ghostty" in (term.removeprefix("xterm-"), program):
            return Protocol.KITTY
        if program in ("iTerm.app", "WezTerm", "mintty") or environment.get("LC_TERMINAL") == "iTerm2":
            return Protocol.ITERM
        if "sixel" in term or term in ("foot", "foot-extra", "mlterm", "yaft-256color", "contour"):
            return Protocol.SIXEL
    return Protocol.BLOCKS if environment.get("COLORTERM") in ("truecolor", "24bit") else None


def encode(picture: Image.Image, protocol: Protocol, *, lines: int) -> str:
    """The picture as text that a terminal shows in so many lines; ends with a line break.

    For half blocks the picture's height is to be twice the number of lines, and its width the number of columns.
    """
    if protocol is Protocol.BLOCKS:
        return half_blocks(picture)
    if protocol is Protocol.SIXEL:
        height = lines * _CELL
        return sixels(picture.resize((picture.width * height // picture.height, height))) + "\n"
    content = io.BytesIO()
    picture.save(content, format="PNG")
    data = base64.b64encode(content.getvalue()).decode()
    if protocol is Protocol.ITERM:
        return f"\x1b]1337;File=inline=1;height={lines};preserveAspectRatio=1;size={len(content.getvalue())}:{data}\a\n"
    parts = [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)]
    keys = [f"a=T,f=100,r={lines},q=2,", *[""] * (len(parts) - 1)]
    more = [*[1] * (len(parts) - 1), 0]
    sequences = zip(keys, more, parts, strict=True)
    return "".join(f"\x1b_G{key}m={rest};{part}\x1b\\" for key, rest, part in sequences) + "\n"


def half_blocks(picture: Image.Image) -> str:
    """One character per two pixels, in 24-bit color; an odd last row has the terminal's background below it."""
    pixels = np.asarray(picture.convert("RGB")).tolist()
    text = []
    for top in range(0, len(pixels), 2):
        below = pixels[top + 1] if top + 1 < len(pixels) else None
        for column, (red, green, blue) in enumerate(pixels[top]):
            background = "" if below is None else "\x1b[48;2;{};{};{}m".format(*below[column])
            text.append(f"\x1b[38;2;{red};{green};{blue}m{background}▀")
        text.append("\x1b[0m\n")
    return "".join(text)


def sixels(picture: Image.Image) -> str:
    """The picture in at most 128 colors, as sixels: bands of six rows, each color of a band written once."""
    reduced = picture.convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE)
    palette = np.asarray(reduced.getpalette(), dtype=np.int64).reshape(-1, 3)
    index = np.asarray(reduced)
    height, width = index.shape
    used = np.unique(index)
    colors = [f"#{color};2;" + ";".join(str(round(each / 2.55)) for each in palette[color]) for color in used]
    bands = []
    for top in range(0, height, _BAND):
        band = index[top : top + _BAND]
        weights = 1 << np.arange(len(band))[:, None]
        rows = [f"#{color}" + _runs(((band == color) * weights).sum(axis=0)) for color in np.unique(band)]
        bands.append("$".join(rows))
    return f'\x1bP0;1q"1;1;{width};{height}' + "".join(colors) + "-".join(bands) + "\x1b\\"


def _runs(values: np.ndarray) -> str:
    """Sixels of one color along a band; more than three equal ones are written with their number."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    counts = np.diff(starts, append=len(values))
    pieces = []
    for value, count in zip(values[starts].tolist(), counts.tolist(), strict=True):
        sixel = chr(63 + value)
        pieces.append(f"!{count}{sixel}" if count > 3 else sixel * count)
    return "".join(pieces)
