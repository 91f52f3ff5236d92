"""The frame of a chart: from numbers to places on a drawing, and round numbers to label them with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .document import Chart, Series
from .markup import Markup, join, tag

WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 46


@dataclass(frozen=True)
class Axis:
    """Numbers from `low` to `high` along pixels from `start` to `end`; ticks are round numbers between."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, about: int = 5, zero: bool = False) -> "Axis":
        """One that holds all values and begins and ends at ticks. zero: let it begin at 0."""
        low, high = min(values), max(values)
        low = min(0.0, low) if zero else low
        step = round_step((high - low) / about)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        last = max(last, first + 1)
        ticks = tuple(index * step for index in range(first, last + 1))
        return cls(ticks[0], ticks[-1], start, end, ticks)

    def at(self, value: float) -> float:
        """The pixel of a number."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def label(self, tick: float) -> str:
        """A tick with as many digits as its neighbours need."""
        step = self.ticks[1] - self.ticks[0]
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        return f"{tick:.{digits}f}"


def round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, the next above what is asked; 1 where nothing is."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


# MERGED from mctf.reproduce.charts:
# Charts as inline SVG that takes its colours from the page, so that it follows light and dark.
#
# Series differ by colour, by mark and by dashes: none is told by colour alone.

_DASHES = ("", "7 4", "2 4", "9 3 2 3", "4 2", "1 3", "12 4")
_MARKS = 4
_SIZE = 4.5


def draw(chart: Chart, *, name: str) -> Markup:
    """The chart as an image with a title and a description, and its legend below. name: unique in the page."""
    x, y = _axes(chart)
    shapes = _bars(chart.series, x, y) if chart.bars else _lines(chart.series, x, y)
    return join(
        tag(
            "svg",
            tag("title", chart.caption, id=f"{name}-title"),
            tag("desc", chart.summary, id=f"{name}-desc"),
            _frame(chart, x, y),
            *shapes,
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
            aria_labelledby=f"{name}-title {name}-desc",
            class_="chart",
        ),
        _legend(chart),
    )


def _axes(chart: Chart) -> tuple[Axis, Axis]:
    xs = [x for series in chart.series for x, _ in series.points]
    ys = [y for series in chart.series for _, y in series.points]
    if chart.bars:  # a bar stands between its own x and the next
        step = _bar_width(chart.series)
        xs += [x + step for x in xs]
    across = Axis.over(xs, LEFT, WIDTH - RIGHT, about=6)
    return across, Axis.over(ys, HEIGHT - BOTTOM, TOP, zero=chart.bars or min(ys) < 0.3 * max(ys))


def _frame(chart: Chart, x: Axis, y: Axis) -> Markup:
    bottom = HEIGHT - BOTTOM
    parts = []
    for tick in y.ticks:
        at = f"{y.at(tick):.1f}"
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(tag("text", y.label(tick), x=LEFT - 8, y=at, dy="0.35em", text_anchor="end"))
    for tick in x.ticks:
        at = f"{x.at(tick):.1f}"
        parts.append(tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 5, class_="tick"))
        parts.append(tag("text", x.label(tick), x=at, y=bottom + 19, text_anchor="middle"))
    parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_="axis"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(tag("text", chart.x, x=middle, y=HEIGHT - 8, text_anchor="middle", class_="name"))
    turned = f"translate(14 {(TOP + bottom) / 2}) rotate(-90)"
    parts.append(tag("text", chart.y, transform=turned, text_anchor="middle", class_="name"))
    return tag("g", *parts, aria_hidden="true")


def _lines(all_series: Sequence[Series], x: Axis, y: Axis) -> list[Markup]:
    groups = []
    for index, series in enumerate(all_series):
        places = [(x.at(across), y.at(up)) for across, up in series.points]
        parts = []
        if series.line:
            path = " ".join(f"{across:.1f},{up:.1f}" for across, up in places)
            parts.append(tag("polyline", points=path, stroke_dasharray=_DASHES[index % len(_DASHES)] or None))
        for number, ((across, up), place) in enumerate(zip(series.points, places, strict=True)):
            name = series.labels[number] if series.labels else series.name
            parts.append(_mark(index, *place, title=f"{name}: {across:.4g}, {up:.4g}"))
        parts += [_label(text, place, places) for text, place in zip(series.labels, places, strict=False)]
        groups.append(tag("g", *parts, class_=f"series s{index}"))
    return groups


def _label(text: str, place: tuple[float, float], others: Sequence[tuple[float, float]]) -> Markup:
    """A word right of its point, or left of it where another point stands in its way."""
    x, y = place
    crowded = any(0 < other - x < 60 and abs(up - y) < 9 for other, up in others)
    side, anchor = (-1, "end") if crowded else (1, "start")
    return tag("text", text, x=f"{x + side * 8:.1f}", y=f"{y:.1f}", dy="0.35em", text_anchor=anchor, class_="label")


def _bars(all_series: Sequence[Series], x: Axis, y: Axis) -> list[Markup]:
    groups = []
    whole = _bar_width(all_series)
    share = whole / len(all_series)
    for index, series in enumerate(all_series):
        parts = []
        for start, height in series.points:
            left, right = x.at(start + share * index), x.at(start + share * (index + 1))
            top = y.at(height)
            title = tag("title", f"{series.name}, {start:g} to {start + whole:g}: {height:g}")
            parts.append(
                tag(
                    "rect",
                    title,
                    x=f"{left + 0.5:.1f}",
                    y=f"{top:.1f}",
                    width=f"{max(0.5, right - left - 1):.1f}",
                    height=f"{y.at(0) - top:.1f}",
                )
            )
        groups.append(tag("g", *parts, class_=f"bars s{index}"))
    return groups


def _bar_width(all_series: Sequence[Series]) -> float:
    starts = sorted({x for series in all_series for x, _ in series.points})
    return min((later - earlier for earlier, later in pairwise(starts)), default=1.0)


def _mark(index: int, x: float, y: float, *, title: str = "") -> Markup:
    """A circle, square, triangle or diamond."""
    s = _SIZE
    inside = [tag("title", title)] if title else []
    kind = index % _MARKS
    if kind == 0:
        return tag("circle", *inside, cx=f"{x:.1f}", cy=f"{y:.1f}", r=s)
    if kind == 1:
        return tag("rect", *inside, x=f"{x - s:.1f}", y=f"{y - s:.1f}", width=2 * s, height=2 * s)
    triangle, diamond = ((0, -1.3), (1.2, 1), (-1.2, 1)), ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0))
    path = " ".join(f"{x + s * dx:.1f},{y + s * dy:.1f}" for dx, dy in (triangle if kind == 2 else diamond))
    return tag("polygon", *inside, points=path)


def _legend(chart: Chart) -> Markup:
    items = []
    for index, series in enumerate(chart.series):
        if chart.bars:
            sample = tag("g", tag("rect", x=6, y=3, width=16, height=10), class_=f"bars s{index}")
        else:
            dashes = _DASHES[index % len(_DASHES)] or None
            line = [tag("polyline", points="0,8 28,8", stroke_dasharray=dashes)] if series.line else []
            sample = tag("g", *line, _mark(index, 14, 8), class_=f"series s{index}")
        swatch = tag("svg", sample, viewBox="0 0 28 16", aria_hidden="true", class_="swatch")
        items.append(tag("li", swatch, series.name))
    return tag("ul", *items, class_="legend")
