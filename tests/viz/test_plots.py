"""Plots as files: equal figures give equal bytes, and matplotlib is required by name."""

import sys
from pathlib import Path

import pytest

from mctf.errors import MctfError
from mctf.viz.plots import Line, Panel, check_format, draw, render, write_plot

PANEL = Panel((Line("mctf", ((1.0, 0.1), (2.0, 0.01)), strong=True), Line("tome", ((1.0, 0.2),))), "GFLOPs", "KL")


def test_equal_figures_give_equal_bytes_and_text_stays_text() -> None:
    first, second = (render(draw([PANEL], title="A & B"), "svg") for _ in range(2))
    assert first == second
    assert b">A &amp; B</text>" in first
    assert b"<dc:date>" not in first


def test_the_format_follows_the_name(tmp_path: Path) -> None:
    write_plot(draw([PANEL], title="t"), tmp_path / "plot.PNG")
    assert (tmp_path / "plot.PNG").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(MctfError, match=r"plot\.pdf is neither \.png nor \.svg"):
        check_format(Path("plot.pdf"))


def test_without_matplotlib_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MctfError, match=r"plots need matplotlib, .*: pip install 'mctf\[report\]'"):
        check_format(Path("plot.svg"))
