"""Plots of figures over cost: one line a method, named at its end instead of in a legend.

matplotlib is imported when a plot is drawn. Its figures are used without pyplot, so no window system is asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from .._utils import atomic_write
from ..errors import MctfError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from collections.abc import Callable

from ..evaluation.compare import CONTROL, Comparison, Result
from ..evaluation.evaluate import Row

FORMATS = (".png", ".svg")
_COLOURS = (
    "#1f6fb4",
    "#c8553d",
    "#3a8f5c",
    "#8a5fb0",
    "#b8860b",
    "#2a9d9d",
    "#b04a7d",
    "#6b7280",
    "#5d7a1f",
    "#3d4f9f",
)
_MARKERS = "osD^vP*Xph"
_STRONG, _QUIET, _INK, _GRID = "#111827", "#9ca3af", "#374151", "#e5e7eb"
_LINE_HEIGHT = 1.25  # room for a label, in heights of its letters
_LETTERS = 8  # points


@dataclass(frozen=True)
class Line:
    """Points (x, y) of one method. strong: drawn in front, black and bold; quiet: behind, grey and dashed."""

    name: str
    points: tuple[tuple[float, float], ...]
    strong: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Panel:
    """One diagram. level: a value of y to compare with, with its name. logarithmic: y by powers of ten."""

    lines: tuple[Line, ...]
    x_label: str
    y_label: str
    level: tuple[float, str] | None = None
    logarithmic: bool = False


def draw(panels: Sequence[Panel], *, title: str) -> "Figure":
    """The panels side by side, a method in the same colour in all of them."""
    if not panels:
        raise MctfError("a plot needs at least one panel: nothing was measured that could be drawn")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(panels), 4.6), layout="constrained", facecolor="white")
    figure.suptitle(title, color=_INK, fontsize=11)
    inks = _inks([line for panel in panels for line in panel.lines])
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        _dress(axes, panel)
        for line in panel.lines:
            _draw_line(axes, line, inks[line.name])
        _name_lines(figure, axes, panel.lines, inks)
    return figure


def _inks(lines: Sequence[Line]) -> dict[str, tuple[str, str]]:
    """Colour and marker of every name; colours that are not black or grey go to the others in turn."""
    others = list(dict.fromkeys(line.name for line in lines if not line.strong and not line.quiet))
    inks = {name: (_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]) for i, name in enumerate(others)}
    for line in lines:
        if line.name not in inks:
            inks[line.name] = (_STRONG, "o") if line.strong else (_QUIET, ".")
    return inks


def _dress(axes: "Axes", panel: Panel) -> None:
    axes.set_xlabel(panel.x_label, color=_INK)
    axes.set_ylabel(panel.y_label, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_QUIET)
    axes.tick_params(colors=_INK, labelsize=_LETTERS)
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.08, y=0.08)
    if panel.logarithmic:
        axes.set_yscale("log")
    if panel.level is not None:
        value, name = panel.level
        axes.axhline(value, color=_QUIET, linewidth=1, linestyle=":")
        side = axes.get_yaxis_transform()  # x in shares of the width, y in data
        axes.text(0.01, value, name, transform=side, va="bottom", fontsize=_LETTERS, color=_INK)


def _draw_line(axes: "Axes", line: Line, ink: tuple[str, str]) -> None:
    colour, marker = ink
    points = sorted(line.points)
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=colour,
        marker=marker,
        markersize=5,
        linewidth=2.2 if line.strong else 1.3,
        linestyle="--" if line.quiet else "-",
        zorder=4 if line.strong else 2 if line.quiet else 3,
    )


def _name_lines(figure: "Figure", axes: "Axes", lines: Sequence[Line], inks: Mapping[str, tuple[str, str]]) -> None:
    """Each name right of its dearest point; names that would cover each other are moved apart, and led to theirs."""
    figure.draw_without_rendering()  # settles the layout, in which heights are compared
    ends = {line.name: max(line.points) for line in lines}
    pixels = {name: axes.transData.transform(end)[1] for name, end in ends.items()}
    room = _LETTERS * _LINE_HEIGHT * figure.dpi / 72
    heights = spread_apart(list(pixels.values()), room)
    right = max(x for x, _ in ends.values())
    low, high = axes.get_xlim()
    axes.set_xlim(low, high + 0.36 * (high - low))
    for line, height in zip(lines, heights, strict=True):
        y = axes.transData.inverted().transform((0, height))[1]
        axes.annotate(
            line.name,
            ends[line.name],
            xytext=(right + 0.07 * (high - low), y),
            va="center",
            fontsize=_LETTERS,
            fontweight="bold" if line.strong else "normal",
            color=inks[line.name][0],
            arrowprops={"arrowstyle": "-", "color": _GRID, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)},
        )


def spread_apart(heights: Sequence[float], room: float) -> list[float]:
    """Heights in the same order, at least `room` apart, each group of neighbours staying around its own middle."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    groups: list[list[int]] = []
    for index in order:
        groups.append([index])
        while len(groups) > 1 and _bottom(groups[-1], heights, room) - _top(groups[-2], heights, room) < room:
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = list(heights)
    for group in groups:
        bottom = _bottom(group, heights, room)
        for place, index in enumerate(group):
            moved[index] = bottom + place * room
    return moved


def _bottom(group: Sequence[int], heights: Sequence[float], room: float) -> float:
    return sum(heights[index] for index in group) / len(group) - room * (len(group) - 1) / 2


def _top(group: Sequence[int], heights: Sequence[float], room: float) -> float:
    return _bottom(group, heights, room) + room * (len(group) - 1)


def check_format(path: Path) -> None:
    """Raise MctfError unless the name says PNG or SVG."""
    if path.suffix.lower() not in FORMATS:
        raise MctfError(f"{path} is neither .png nor .svg: name the plot with one of these")


def write_plot(figure: "Figure", path: Path) -> None:
    """Write all of it or nothing, as the name says."""
    from matplotlib import rc_context

    check_format(path)
    form, content = path.suffix.lower().removeprefix("."), BytesIO()
    # text stays text in SVG; without a date and with fixed names the same figures give the same file
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "mctf"}):
        figure.savefig(content, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    atomic_write(path, content.getvalue())


# MERGED from mctf.viz.plots:
# The results of methods at several costs as diagrams over GFLOPs.

_COST = "GFLOPs"
_OURS = "mctf"
_SAVES = 0.02  # a smaller share of the cost is nothing, and a point beside the plain model would squeeze the others


def panels(comparison: Comparison) -> list[Panel]:
    """What is lost of the plain model, KL or the cosine of features; and accuracy, where classes are known."""
    drawn = []
    if comparison.baseline.kl is not None:
        lines = _lines(comparison, lambda row: row.kl or None)  # none on a scale of powers where nothing is lost
        drawn.append(Panel(lines, _COST, "KL to the plain model, nats", logarithmic=True))
    else:
        drawn.append(Panel(_lines(comparison, lambda row: row.class_cosine), _COST, "cosine to the plain model"))
    if comparison.baseline.top1 is not None:
        level = (comparison.baseline.top1, "plain model")
        drawn.append(Panel(_lines(comparison, lambda row: row.top1), _COST, "top-1 %", level=level))
    return [panel for panel in drawn if panel.lines]


def _lines(comparison: Comparison, value: Callable[[Row], float | None]) -> tuple[Line, ...]:
    """One line a method, through the costs it was measured at; none for what saves nothing."""
    points: dict[str, list[tuple[float, float]]] = {}
    kinds: dict[str, str] = {}
    for result in comparison.results:
        y = value(result.row)
        if y is not None and result.row.gflops < (1 - _SAVES) * comparison.baseline.gflops:
            name = _label(result)
            kinds[name] = result.candidate.kind
            points.setdefault(name, []).append((result.row.gflops, y))
    return tuple(
        Line(name, tuple(sorted(found)), strong=name == _OURS, quiet=kinds[name] == CONTROL)
        for name, found in points.items()
    )


def _label(result: Result) -> str:
    return f"{result.row.method} (untrained)" if result.candidate.untrained else result.row.method
