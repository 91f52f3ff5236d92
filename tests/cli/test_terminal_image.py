"""Pictures in the terminal: which protocol is chosen, and that each carries the pixels."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from helpers.images import make_picture
from mctf.cli.terminal_image import Protocol, detect, encode, half_blocks, sixels

COLORS = {"COLORTERM": "truecolor"}


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({}, None),
        ({"TERM": "xterm-256color"}, None),
        ({"TERM": "xterm-256color", **COLORS}, Protocol.BLOCKS),
        ({"TERM": "xterm", "COLORTERM": "24bit"}, Protocol.BLOCKS),
        ({"TERM": "xterm-kitty", **COLORS}, Protocol.KITTY),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, Protocol.KITTY),
        ({"TERM": "xterm-ghostty"}, Protocol.KITTY),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, Protocol.ITERM),
        ({"TERM": "xterm-256color", "LC_TERMINAL": "iTerm2"}, Protocol.ITERM),
        ({"TERM": "foot", **COLORS}, Protocol.SIXEL),
        ({"TERM": "xterm-sixel"}, Protocol.SIXEL),
        ({"TERM": "tmux-256color", "KITTY_WINDOW_ID": "1", **COLORS}, Protocol.BLOCKS),
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/tmux"}, None),
        ({"TERM": "dumb", **COLORS}, None),
        ({"TERM": "xterm-kitty", "NO_COLOR": "1"}, None),
    ],
)
def test_the_protocol_is_that_of_the_terminal(environment: dict[str, str], protocol: Protocol | None) -> None:
    assert detect(environment, terminal=True) is protocol
    assert detect(environment, terminal=False) is None, "a pipe gets no picture"


def test_kitty_and_iterm_carry_a_png() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    pieces = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", encode(picture, Protocol.KITTY, lines=7))
    assert pieces[0][0] == "a=T,f=100,r=7,q=2,m=1"
    assert [keys for keys, _ in pieces[1:]] == ["m=1"] * (len(pieces) - 2) + ["m=0"]
    assert max(len(data) for _, data in pieces) <= 4096
    (iterm,) = re.findall(
        r"^\x1b\]1337;File=inline=1;height=7;[^:]*:(.*)\x07\n$", encode(picture, Protocol.ITERM, lines=7)
    )
    for data in ("".join(data for _, data in pieces), iterm):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), noise)


def test_half_blocks_show_two_rows_per_line() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    text = half_blocks(Image.fromarray(pixels))
    cell = r"\x1b\[38;2;(\d+);(\d+);(\d+)m(?:\x1b\[48;2;(\d+);(\d+);(\d+)m)?▀"
    lines = text.splitlines()
    assert len(lines) == 3
    for top, line in zip(range(0, 5, 2), lines, strict=True):
        found = re.findall(cell, line)
        assert [tuple(map(int, each[:3])) for each in found] == [tuple(each) for each in pixels[top].tolist()]
        below = [tuple(map(int, each[3:])) for each in found if each[3]]
        assert below == ([tuple(each) for each in pixels[top + 1].tolist()] if top + 1 < 5 else [])
        assert line.endswith("\x1b[0m")


def read_sixels(text: str) -> np.ndarray:
    """The pixels of a sixel picture, H W 3 in percent."""
    width, height, body = re.fullmatch(r'\x1bP0;1q"1;1;(\d+);(\d+)(.*)\x1b\\', text, flags=re.DOTALL).groups()
    palette, pixels = {}, np.full((int(height), int(width), 3), -1)
    color = column = band = 0
    for token in re.finditer(r"#(\d+)(?:;2;(\d+);(\d+);(\d+))?|!(\d+)([?-~])|([?-~])|([$-])", body):
        number, red, green, blue, count, repeated, single, control = token.groups()
        if control:
            column, band = 0, band + (control == "-")
        elif red is not None:
            palette[int(number)] = (int(red), int(green), int(blue))
        elif number is not None:
            color = int(number)
        else:
            end = column + int(count or 1)
            for row in range(6):
                if (ord(repeated or single) - 63) >> row & 1:
                    pixels[6 * band + row, column:end] = palette[color]
            column = end
    return pixels


@pytest.mark.parametrize(("width", "height"), [(40, 24), (33, 17), (1, 1)])
def test_sixels_show_the_picture(width: int, height: int) -> None:
    picture = make_picture(0, width=width, height=height)
    shown = read_sixels(sixels(picture))
    reduced = np.asarray(picture.quantize(128, dither=Image.Dither.NONE).convert("RGB")) / 2.55
    assert shown.min() >= 0, "every pixel has a color"
    assert np.abs(shown - reduced).max() <= 0.5, "percent"
    assert encode(picture, Protocol.SIXEL, lines=2).startswith('\x1bP0;1q"1;1;')
