"""Plots: labels that do not overlap, equal bytes for equal figures, and matplotlib required by name."""

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.comparisons import make_result
from mctf.errors import MctfError
from mctf.evaluation.compare import Comparison
from mctf.viz.plots import Line, Panel, check_format, draw, panels, render, separate_labels, write_plot

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


def test_labels_are_moved_apart_and_keep_their_order() -> None:
    moved = separate_labels([10.0, 11.0, 50.0, 10.5], 4)
    assert moved == pytest.approx([6.5, 14.5, 50.0, 10.5])
    assert separate_labels([], 4) == []


def test_groups_that_grow_into_each_other_are_joined() -> None:
    moved = sorted(separate_labels([0.0, 0.0, 0.0, 5.0, 5.0], 4))
    assert all(after - before >= 4 - 1e-9 for before, after in pairwise(moved))
    assert sum(moved) == pytest.approx(10)


def test_methods_that_save_or_change_nothing_are_not_drawn() -> None:
    baseline = replace(make_result("baseline", 0.0).row, gflops=1.3, top1=60.0)
    results = (make_result("mctf", 0.1), make_result("tome", 0.0), make_result("a_vit", 0.1, target=None, gflops=1.29))
    loss, accuracy = panels(Comparison(6, baseline, results, ()))
    assert [line.name for line in loss.lines] == ["mctf"]
    assert loss.lines[0].strong
    assert [line.name for line in accuracy.lines] == ["mctf", "tome"]
    assert accuracy.level == (60.0, "baseline")


def test_nothing_to_draw_and_nowhere_to_write(tmp_path: Path) -> None:
    with pytest.raises(MctfError, match="at least one panel"):
        draw([], title="t")
    with pytest.raises(MctfError, match="cannot be written"):
        write_plot(draw([PANEL], title="t"), tmp_path / "absent" / "plot.png")
