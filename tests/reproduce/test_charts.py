"""Charts as inline SVG: points where they belong, the page's colors, a text alternative, equal bytes for equal data."""

import re
from itertools import pairwise
from xml.etree import ElementTree

from mctf.reproduce.document import Chart, Origin, Series
from mctf.reproduce.write import draw_chart


def chart(*series: Series, bars: bool = False) -> Chart:
    return Chart("Cost & gain", "It <rises>.", Origin.MEASURED, "GFLOPs", "top-1 %", series, bars)


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parse(svg).iter("text")]


def markers(svg: str, series: int) -> list[tuple[float, float]]:
    """Positions of the markers of a series, the one in the legend last."""
    uses = [use for use in parse(svg).iter("use") if f"fill: var(--c{series})" in str(use.get("style"))]
    return [(float(use.get("x", 0)), float(use.get("y", 0))) for use in uses]


def test_a_chart_has_a_title_and_a_description() -> None:
    svg = parse(draw_chart(chart(Series("a", ((1, 2), (3, 4)))), "here"))
    assert svg.get("role") == "img"
    names = str(svg.get("aria-labelledby")).split()
    texts_by_id = {child.get("id"): child.text for child in svg if child.get("id")}
    assert [texts_by_id[name] for name in names] == ["Cost & gain", "It <rises>."]
    assert next(iter(svg)).tag == "title"


def test_text_stays_text_in_the_page_s_font() -> None:
    svg = draw_chart(chart(Series("one & two", ((1, 2), (3, 4)))), "here")
    assert {"GFLOPs", "top-1 %", "one & two"} <= set(texts(svg))
    assert "font-family" not in svg


def test_colors_are_those_of_the_page() -> None:
    svg = draw_chart(chart(Series("a", ((1, 2), (3, 4))), Series("b", ((1, 3), (3, 5)))), "here")
    assert re.findall(r"#[0-9a-fA-F]{6}\b", svg) == []
    assert "stroke: currentColor" in svg
    assert {"var(--c0)", "var(--c1)"} <= set(re.findall(r"var\(--c\d\)", svg))
    assert "<style" not in svg, "a style inside of a chart would apply to the whole page"


def test_equal_data_gives_equal_bytes_and_ids_of_its_own() -> None:
    data = chart(Series("a", ((1, 2), (3, 4))))
    assert draw_chart(data, "here") == draw_chart(data, "here")
    ids = [set(re.findall(r'\bid="([^"]+)"', draw_chart(data, name))) for name in ("here", "there")]
    assert not ids[0] & ids[1]
    svg = draw_chart(data, "here")
    targets = set(re.findall(r'href="#([^"]+)"', svg)) | set(re.findall(r"url\(#([^)]+)\)", svg))
    assert targets
    assert targets <= ids[0]


def test_points_lie_inside_the_frame_and_in_order() -> None:
    svg = draw_chart(chart(Series("a", ((1, 10), (2, 20), (4, 15))), Series("b", ((3, 12),), line=False)), "here")
    *points, _ = markers(svg, 0)
    (left, top, width, height) = (float(value) for value in str(parse(svg).get("viewBox")).split())
    assert all(left < x < left + width and top < y < top + height for x, y in points)
    assert points[0][0] < points[1][0] < points[2][0]
    assert points[1][1] < points[2][1] < points[0][1]  # y grows downwards
    assert len(markers(svg, 1)) == 2
    assert "stroke: var(--c1)" not in svg, "points that are not joined have no line"


def test_series_differ_by_more_than_color() -> None:
    svg = parse(draw_chart(chart(*(Series(name, ((1, 1), (2, 2))) for name in "abcd")), "here"))
    lines = [path for path in svg.iter("path") if "stroke: var(--c" in str(path.get("style"))]
    dashes = {tuple(re.findall(r"stroke-dasharray: ([^;]*)", str(path.get("style")))) for path in lines}
    assert len(dashes) == 4
    shapes = {path.get("d") for path in svg.iter("path") if path.get("id", "").startswith("here-m")}
    assert len(shapes) >= 4


def test_bars_stand_side_by_side_on_the_axis() -> None:
    points = ((0, 3), (5, 6), (10, 1))
    svg = parse(draw_chart(chart(Series("with", points), Series("without", points), bars=True), "here"))
    bars = [path for path in svg.iter("path") if path.get("clip-path") and "fill: var(--c" in str(path.get("style"))]
    assert len(bars) == 6
    boxes = []
    for bar in bars:
        numbers = [float(value) for value in re.findall(r"-?[\d.]+", str(bar.get("d")))]
        boxes.append((min(numbers[::2]), max(numbers[::2]), max(numbers[1::2])))
    assert all(right <= left for (_, right, _), (left, _, _) in pairwise(sorted(boxes)))
    assert len({round(bottom, 1) for _, _, bottom in boxes}) == 1, "all bars begin at 0"


def test_labels_are_beside_their_points_without_overlap() -> None:
    crowd = Series("others", ((1.0, 5.0), (1.2, 5.0), (3.0, 5.0), (3.0, 5.01)), line=False, labels=("a", "b", "c", "d"))
    far = Series("far", ((1.0, 1.0), (5.0, 9.0)))
    svg = parse(draw_chart(chart(crowd, far), "here"))
    labels = {text.text: text for text in svg.iter("text") if text.text in crowd.labels}
    anchors = {name: re.findall("text-anchor: (\\w+)", str(text.get("style"))) for name, text in labels.items()}
    assert anchors == {"a": ["end"], "b": ["start"], "c": ["start"], "d": ["start"]}
    heights = sorted(float(labels[name].get("y", 0)) for name in "cd")
    assert heights[1] - heights[0] > 10


def test_long_names_have_a_legend_row_of_their_own() -> None:
    for names, columns in ((("MCTF", "ToMe"), 2), (("similarity", "similarity + informativeness + size"), 1)):
        svg = parse(draw_chart(chart(*(Series(name, ((1, 1), (2, 2))) for name in names)), "here"))
        positions = {(text.get("x"), text.get("y")) for text in svg.iter("text") if text.text in names}
        assert len({x for x, _ in positions}) == columns
        assert len({y for _, y in positions}) == 3 - columns
