"""Plots over cost: labels that do not overlap, reproducible files."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.comparisons import make_result
from mctf import MctfError
from mctf.evaluation.compare import Comparison
from mctf.viz.plots import Line, Panel, draw, panels, spread_apart, write_plot


def test_names_are_moved_apart_and_keep_their_order() -> None:
    moved = spread_apart([10.0, 11.0, 50.0, 10.5], 4)
    assert moved == pytest.approx([6.5, 14.5, 50.0, 10.5])
    assert spread_apart([], 4) == []


def test_groups_that_grow_into_each_other_are_joined() -> None:
    moved = sorted(spread_apart([0.0, 0.0, 0.0, 5.0, 5.0], 4))
    assert all(after - before >= 4 - 1e-9 for before, after in pairwise(moved))
    assert sum(moved) == pytest.approx(10)


def test_what_saves_or_loses_nothing_is_not_drawn() -> None:
    base = replace(make_result("base", 0.0).row, gflops=1.3, top1=60.0)
    rows = (make_result("mctf", 0.1), make_result("tome", 0.0), make_result("a_vit", 0.1, target=None, gflops=1.29))
    loss, accuracy = panels(Comparison(6, base, rows, ()))
    assert [line.name for line in loss.lines] == ["mctf"]
    assert loss.lines[0].strong
    assert [line.name for line in accuracy.lines] == ["mctf", "tome"]
    assert accuracy.level == (60.0, "plain model")


@pytest.mark.parametrize("name", ["found.png", "found.SVG"])
def test_the_same_figures_give_the_same_file(tmp_path: Path, name: str) -> None:
    line = Line("mctf", ((1.0, 2.0), (2.0, 1.0)))
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_plot(draw([Panel((line,), "x", "y", logarithmic=True)], title="t"), tmp_path / folder / name)
        files.append((tmp_path / folder / name).read_bytes())
    assert files[0] == files[1]
    assert len(files[0]) > 1000


def test_nothing_to_draw_and_nowhere_to_write(tmp_path: Path) -> None:
    with pytest.raises(MctfError, match="at least one panel"):
        draw([], title="t")
    figure = draw([Panel((Line("a", ((1.0, 1.0),)),), "x", "y")], title="t")
    with pytest.raises(MctfError, match="cannot be written"):
        write_plot(figure, tmp_path / "absent" / "found.png")
    with pytest.raises(MctfError, match=r"neither \.png nor \.svg"):
        write_plot(figure, tmp_path / "found.txt")
