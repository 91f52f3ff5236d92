"""Charts: round axes, points where they belong, and drawings that any reader of XML understands."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from mctf.reproduce.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, draw, round_step
from mctf.reproduce.document import Chart, Origin, Series


@pytest.mark.parametrize(("rough", "step"), [(0.03, 0.05), (0.2, 0.2), (3.1, 5), (7, 10), (10, 10), (0, 1)])
def test_steps_are_round(rough: float, step: float) -> None:
    assert round_step(rough) == pytest.approx(step)


@pytest.mark.parametrize("values", [(0.71, 1.26), (0.9991, 1.0), (3.0, 3.0), (-2.0, 5.0), (0.0, 1e-6)])
def test_an_axis_holds_its_values_between_ticks(values: tuple[float, float]) -> None:
    axis = Axis.over(values, 10, 110)
    assert axis.low <= min(values) <= max(values) <= axis.high
    assert 2 <= len(axis.ticks) <= 12
    assert (axis.at(axis.low), axis.at(axis.high)) == (10, 110)
    assert len({axis.label(tick) for tick in axis.ticks}) == len(axis.ticks)


def test_an_axis_may_begin_at_zero() -> None:
    assert Axis.over((4, 9), 0, 1, zero=True).low == 0
    assert Axis.over((4, 9), 0, 1).low > 0


def chart(*series: Series, bars: bool = False) -> Chart:
    return Chart("Cost & gain", "It <rises>.", Origin.MEASURED, "GFLOPs", "top-1 %", series, bars)


def drawn(made: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{draw(made, name='here')}</div>")


def test_a_drawing_says_what_it_shows() -> None:
    svg = drawn(chart(Series("a", ((1, 2), (3, 4))))).find("svg")
    assert svg is not None
    assert svg.get("role") == "img"
    names = str(svg.get("aria-labelledby")).split()
    texts = {child.get("id"): child.text for child in svg if child.get("id")}
    assert [texts[name] for name in names] == ["Cost & gain", "It <rises>."]


def test_points_lie_inside_the_frame_and_in_order() -> None:
    root = drawn(chart(Series("a", ((1, 10), (2, 20), (4, 15))), Series("b", ((3, 12),), line=False)))
    circles = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in root.iterfind("svg/g/circle")]
    assert len(circles) == 3
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in circles)
    assert circles[0][0] < circles[1][0] < circles[2][0]
    assert circles[1][1] < circles[2][1] < circles[0][1]  # up is less
    assert len(root.findall("svg/g/polyline")) == 1
    assert [item.text or item[0].tail for item in root.iterfind("ul/li")] == ["a", "b"]


def test_series_differ_by_more_than_colour() -> None:
    root = drawn(chart(*(Series(name, ((1, 1), (2, 2))) for name in "abcd")))
    lines = root.findall("svg/g/polyline")
    assert len({line.get("stroke-dasharray") for line in lines}) == 4
    shapes = [next(mark.tag for mark in group if mark.tag != "polyline") for group in root.findall("svg/g")[1:]]
    assert shapes == ["circle", "rect", "polygon", "polygon"]


def test_bars_stand_side_by_side_on_the_axis() -> None:
    points = ((0, 3), (5, 6), (10, 0))
    root = drawn(chart(Series("with", points), Series("without", points), bars=True))
    rects = root.findall("svg/g/rect")
    edges = sorted((float(r.get("x", 0)), float(r.get("width", 0))) for r in rects)
    assert len(rects) == 6
    assert all(x + width <= following for (x, width), (following, _) in pairwise(edges))
    for rect in rects:
        assert float(rect.get("y", 0)) + float(rect.get("height", 0)) == pytest.approx(HEIGHT - BOTTOM, abs=0.2)


def test_labels_stand_beside_their_points() -> None:
    crowd = Series("others", ((1.0, 5.0), (1.2, 5.0), (3.0, 5.0)), line=False, labels=("left", "middle", "right"))
    texts = [text for text in drawn(chart(crowd)).iterfind("svg/g/text") if text.get("class") == "label"]
    assert [(text.text, text.get("text-anchor")) for text in texts] == [
        ("left", "end"),
        ("middle", "start"),
        ("right", "start"),
    ]
