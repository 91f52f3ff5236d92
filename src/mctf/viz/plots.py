"""Plots over cost: one line per method, named at its end instead of in a legend.

matplotlib belongs to the extra `report` and is imported when a plot is drawn. Figures are built without pyplot, so no
display is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from .._utils import atomic_write, optional_import
from ..errors import MctfError
from ..evaluation.compare import CONTROL, Comparison, Result
from ..evaluation.evaluate import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
MARKERS = "osD^vP*Xph"
_COLORS = (
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
_STRONG, _QUIET, _INK, _GRID = "#111827", "#9ca3af", "#374151", "#e5e7eb"
_FONT_SIZE = 8  # points
_LINE_HEIGHT = 1.25  # in font sizes
_COST = "GFLOPs"
_OWN_METHOD = "mctf"
_MIN_SAVING = 0.02  # of the baseline's cost; a point nearer to the baseline would compress the scale


@dataclass(frozen=True)
class Line:
    """Points (x, y) of one method. strong: in front, black and bold; quiet: behind, gray and dashed."""

    name: str
    points: tuple[tuple[float, float], ...]
    strong: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Panel:
    """One diagram. level: a reference value of y and its name. logarithmic: the scale of y."""

    lines: tuple[Line, ...]
    x_label: str
    y_label: str
    level: tuple[float, str] | None = None
    logarithmic: bool = False


def panels(comparison: Comparison) -> list[Panel]:
    """A comparison of methods over GFLOPs: KL to the baseline, or the cosine of features, and accuracy if available."""
    drawn = []
    if comparison.baseline.kl is not None:
        lines = _lines(comparison, lambda row: row.kl or None)  # a KL of 0 has no place on a logarithmic scale
        drawn.append(Panel(lines, _COST, "KL to the baseline, nats", logarithmic=True))
    else:
        drawn.append(Panel(_lines(comparison, lambda row: row.class_cosine), _COST, "cosine to the baseline"))
    if comparison.baseline.top1 is not None:
        level = (comparison.baseline.top1, "baseline")
        drawn.append(Panel(_lines(comparison, lambda row: row.top1), _COST, "top-1 %", level=level))
    return [panel for panel in drawn if panel.lines]


def _lines(comparison: Comparison, value: Callable[[Row], float | None]) -> tuple[Line, ...]:
    """One line per method through its measured costs; points that save nothing are omitted."""
    points: dict[str, list[tuple[float, float]]] = {}
    kinds: dict[str, str] = {}
    for result in comparison.results:
        y = value(result.row)
        if y is not None and result.row.gflops < (1 - _MIN_SAVING) * comparison.baseline.gflops:
            name = _label(result)
            kinds[name] = result.candidate.kind
            points.setdefault(name, []).append((result.row.gflops, y))
    return tuple(
        Line(name, tuple(sorted(each)), strong=name == _OWN_METHOD, quiet=kinds[name] == CONTROL)
        for name, each in points.items()
    )


def _label(result: Result) -> str:
    return f"{result.row.method} (untrained)" if result.candidate.untrained else result.row.method


def draw(panels: Sequence[Panel], *, title: str) -> "Figure":
    """The panels side by side, a method in the same color in all of them."""
    if not panels:
        raise MctfError("a plot needs at least one panel: there are no measurements to draw")
    figure = new_figure(6.4 * len(panels), 4.6, layout="constrained", facecolor="white")
    figure.suptitle(title, color=_INK, fontsize=11)
    styles = _styles([line for panel in panels for line in panel.lines])
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        style_axes(axes, panel.x_label, panel.y_label)
        if panel.logarithmic:
            axes.set_yscale("log")
        if panel.level is not None:
            value, name = panel.level
            axes.axhline(value, color=_QUIET, linewidth=1, linestyle=":")
            side = axes.get_yaxis_transform()  # x as a fraction of the width, y in data coordinates
            axes.text(0.01, value, name, transform=side, va="bottom", fontsize=_FONT_SIZE, color=_INK)
        for line in panel.lines:
            color, marker = styles[line.name]
            x, y = zip(*sorted(line.points), strict=True)
            axes.plot(
                x,
                y,
                color=color,
                marker=marker,
                markersize=5,
                linewidth=2.2 if line.strong else 1.3,
                linestyle="--" if line.quiet else "-",
                zorder=4 if line.strong else 2 if line.quiet else 3,
            )
        _label_lines(figure, axes, panel.lines, styles)
    return figure


def new_figure(width: float, height: float, **options: object) -> "Figure":
    """A matplotlib figure of this size in inches."""
    figure = optional_import("matplotlib.figure", extra="report", purpose="plots")
    return figure.Figure(figsize=(width, height), **options)


def style_axes(
    axes: "Axes",
    x_label: str,
    y_label: str,
    *,
    ink: str = _INK,
    spine: str = _QUIET,
    grid: str = _GRID,
    font_size: float = _FONT_SIZE,
) -> None:
    """Axes with names, a grid behind the data, and neither a top nor a right spine."""
    axes.set_xlabel(x_label, color=ink, fontsize=font_size + 1)
    axes.set_ylabel(y_label, color=ink, fontsize=font_size + 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(spine)
    axes.tick_params(colors=ink, labelsize=font_size)
    axes.grid(color=grid, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.08, y=0.08)


def _styles(lines: Sequence[Line]) -> dict[str, tuple[str, str]]:
    """Color and marker by name."""
    others = list(dict.fromkeys(line.name for line in lines if not line.strong and not line.quiet))
    styles = {name: (_COLORS[i % len(_COLORS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(others)}
    for line in lines:
        if line.name not in styles:
            styles[line.name] = (_STRONG, "o") if line.strong else (_QUIET, ".")
    return styles


def _label_lines(figure: "Figure", axes: "Axes", lines: Sequence[Line], styles: Mapping[str, tuple[str, str]]) -> None:
    """Each name right of its most expensive point; names that would overlap are moved apart and get a leader line."""
    figure.draw_without_rendering()  # the layout fixes the heights in pixels
    ends = {line.name: max(line.points) for line in lines}
    pixels = [axes.transData.transform(end)[1] for end in ends.values()]
    heights = separate_labels(pixels, _FONT_SIZE * _LINE_HEIGHT * figure.dpi / 72)
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
            fontsize=_FONT_SIZE,
            fontweight="bold" if line.strong else "normal",
            color=styles[line.name][0],
            arrowprops={"arrowstyle": "-", "color": _GRID, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)},
        )


def separate_labels(heights: Sequence[float], gap: float) -> list[float]:
    """Heights in the same order, at least `gap` apart; each cluster stays centered on its own mean."""

    def bottom(cluster: Sequence[int]) -> float:
        return sum(heights[index] for index in cluster) / len(cluster) - gap * (len(cluster) - 1) / 2

    clusters: list[list[int]] = []
    for index in sorted(range(len(heights)), key=heights.__getitem__):
        clusters.append([index])
        while len(clusters) > 1 and bottom(clusters[-1]) - bottom(clusters[-2]) < gap * len(clusters[-2]):
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    separated = list(heights)
    for cluster in clusters:
        for rank, index in enumerate(cluster):
            separated[index] = bottom(cluster) + rank * gap
    return separated


def check_format(path: Path) -> None:
    """Raise MctfError unless the name ends in .png or .svg and matplotlib is installed."""
    if path.suffix.lower() not in FORMATS:
        raise MctfError(f"{path} is neither .png nor .svg: name the plot with one of these")
    optional_import("matplotlib", extra="report", purpose="plots")


def render(figure: "Figure", form: str) -> bytes:
    """The figure as "png" or "svg"; equal figures give equal bytes, and text in SVG stays text."""
    matplotlib = optional_import("matplotlib", extra="report", purpose="plots")
    content = BytesIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type")) if form == "svg" else None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mctf"}):
        figure.savefig(content, format=form, dpi=150, metadata=metadata)
    return content.getvalue()


def write_plot(figure: "Figure", path: Path) -> None:
    """Write a PNG or SVG file, by its name."""
    check_format(path)
    atomic_write(path, render(figure, path.suffix.lower().removeprefix(".")))
