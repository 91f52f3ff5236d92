"""The report on disk: the page, Markdown and JSON, rendered from templates and written atomically.

jinja2 and matplotlib belong to the extra `report`. The page is one file: style, script, charts and pictures are inline.
"""

import base64
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._utils import atomic_write, optional_import
from ..errors import MctfError
from ..viz.plots import MARKERS, new_figure, render, separate_labels, style_axes
from . import analysis_sections, cost_sections, paper, study_sections
from .display_names import VERDICT_MARKS, VERDICTS
from .document import Chart, Column, Report, Section, Series, Verdict, Viewer
from .records import Record, make_folder
from .runner import experiments
from .studies import StudyResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "Multi-criteria Token Fusion, measured again"
PICTURES = "pictures"
_FILES = ("index.html", "report.md", "report.json")

_SECTIONS = {
    **cost_sections.SECTIONS,
    **study_sections.SECTIONS,
    **analysis_sections.SECTIONS,
}

# Charts are drawn with these colors, which are then replaced by those of the page, so that they follow its theme.
_INK, _PAGE = "#010101", "#fefefe"
_SERIES = tuple(f"#0101{index:02x}" for index in range(0x10, 0x17))
_THEME = {_INK: "currentColor", _PAGE: "var(--page)"} | {color: f"var(--c{i})" for i, color in enumerate(_SERIES)}
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 2)), "-.", (0, (3, 1)), (0, (1, 1)), (0, (8, 2)))
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 440, 300, 68, 12, 8, 46  # points, which are units of the SVG
_LEGEND_ROW = 20
_FONT_SIZE = 12
_SHORT = 24  # characters up to which two names fit side by side in the legend


def check_dependencies() -> None:
    """Raise MctfError where a package that the report needs is missing."""
    for module in ("jinja2", "matplotlib"):
        optional_import(module, extra="report", purpose="reports")


def check_report_folder(folder: Path) -> None:
    """Raise MctfError where a report would overwrite files of another program, or cannot be written."""
    if os.path.lexists(folder / PICTURES) and not (folder / PICTURES).is_dir():
        raise MctfError(f"{folder / PICTURES} is not a folder: name another --out")
    page = folder / "index.html"
    try:
        ours = page.is_file() and TITLE.encode() in page.read_bytes()
    except OSError:
        ours = False
    for name in _FILES:
        if os.path.lexists(folder / name) and not ours and not (folder / "results").is_dir():
            raise MctfError(f"{folder / name} is not of mctf reproduce and would be overwritten: name another --out")


def write_report(
    folder: Path, records: Mapping[str, Record], *, facts: Mapping[str, str], skipped: Mapping[str, str]
) -> dict[str, Any]:
    """Write index.html, report.md and report.json from all records, and return the JSON object.

    facts: by heading. skipped: reasons by the name of an experiment.
    """
    titles = {each.name: each.title for each in experiments()}
    report = Report(facts, make_sections(records), {titles[name]: reason for name, reason in skipped.items()})
    content = to_json(report, records)
    files = {
        "index.html": render_page(report, folder / PICTURES),
        "report.md": render_markdown(report, PICTURES),
        "report.json": json.dumps(content, indent=1) + "\n",
    }
    make_folder(folder)
    for name, text in files.items():
        atomic_write(folder / name, text.encode(errors="backslashreplace"))  # names of files may be no UTF-8
    return content


def make_sections(records: Mapping[str, Record]) -> tuple[Section, ...]:
    """One section per record, in the order of the experiments."""
    return tuple(
        _SECTIONS[each.name](each, records[each.name].result) for each in experiments() if each.name in records
    )


def to_json(report: Report, records: Mapping[str, Record]) -> dict[str, Any]:
    """Facts, and per experiment its findings and numbers; values per image are only in the results folder."""
    content = {}
    for section in report.sections:
        record = records[section.name]
        result = record.result
        content[section.name] = {
            "title": section.title,
            "measures": section.measures,
            "source": section.source,
            "findings": [asdict(finding) for finding in section.findings],
            **record.to_json(),
            "result": result.to_json(per_image=False) if isinstance(result, StudyResult) else result.to_json(),
        }
    return {"facts": dict(report.facts), "experiments": content, "skipped": dict(report.skipped)}


def render_page(report: Report, pictures: Path) -> str:
    """The report as one HTML file. pictures: the folder of the sections' pictures."""

    def data_uri(file: str) -> str:
        path = pictures / file
        return f"data:image/{path.suffix[1:]};base64,{base64.b64encode(path.read_bytes()).decode()}"

    def viewer_data(viewer: Viewer) -> dict[str, Any]:
        files = [[[data_uri(file) for file in blocks] for blocks in images] for images in viewer.files]
        return {"reductions": viewer.reductions, "tokens": viewer.tokens, "pictures": files}

    return _render(
        "page.html.j2",
        report,
        filters={"data_uri": data_uri},
        draw_chart=draw_chart,
        viewer_data=viewer_data,
        marks=VERDICT_MARKS,
    )


def render_markdown(report: Report, pictures: str) -> str:
    """The report as Markdown, without charts. pictures: the folder of the pictures, relative to the file."""
    return _render("report.md.j2", report, filters={}, pictures=pictures)


def _render(template: str, report: Report, *, filters: Mapping[str, Callable[..., str]], **names: Any) -> str:
    jinja2 = optional_import("jinja2", extra="report", purpose="reports")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mctf", "reproduce/templates"),
        autoescape=template.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"keep_errors": _keep_errors, "column_title": _column_title, "bold": _bold, **filters}
    context = {"title": TITLE, "origin": paper.origin(), "tally": tally(report), "verdicts": VERDICTS, **names}
    return environment.get_template(template).render(report=report, **context)


def _keep_errors(text: str) -> str:
    """A number and its standard error stay on one line."""
    return text.replace(" ± ", "\u00a0±\u00a0")


def _column_title(column: Column) -> str:
    title = ", ".join(each for each in (column.over, column.title) if each)
    return f"{title} ({column.origin})" if column.origin else title


def _bold(text: str) -> str:
    return f"**{text}**" if text else text


def tally(report: Report) -> str:
    """The number of findings per verdict, which also explains the marks."""
    agree, differ, close = (report.count(each) for each in (Verdict.AGREES, Verdict.DIFFERS, Verdict.CLOSE))
    text = (
        f"Of {agree + differ + close} findings that can be compared, {agree} are as in the paper "
        f"({VERDICT_MARKS[Verdict.AGREES]}), {differ} are not ({VERDICT_MARKS[Verdict.DIFFERS]}) and {close} are too "
        f"close to call on these images ({VERDICT_MARKS[Verdict.CLOSE]}): a difference counts from two standard errors "
        "(±) on."
    )
    return text + (
        f" The others ({VERDICT_MARKS[Verdict.OPEN]}) are not in the paper." if report.count(Verdict.OPEN) else ""
    )


def draw_chart(chart: Chart, name: str) -> str:
    """The chart as inline SVG in the colors of the page, with a title and a description. name: unique in the page.

    Series differ by color, marker and dashes: color alone never distinguishes two of them.
    """
    ticker = optional_import("matplotlib.ticker", extra="report", purpose="plots")
    legend_columns = 2 if max(len(series.name) for series in chart.series) <= _SHORT else 1
    height = _HEIGHT + _LEGEND_ROW * math.ceil(len(chart.series) / legend_columns)
    bottom = height - _HEIGHT + _BOTTOM
    figure = new_figure(_WIDTH / 72, height / 72, facecolor="none")
    axes = figure.add_axes(
        (_LEFT / _WIDTH, bottom / height, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, (height - bottom - _TOP) / height)
    )
    axes.set_facecolor("none")
    style_axes(axes, chart.x, chart.y, ink=_INK, spine=_INK, grid=_INK, font_size=_FONT_SIZE)
    axes.grid(alpha=0.15)
    (_draw_bars if chart.bars else _draw_lines)(axes, chart.series)
    points = [point for series in chart.series for point in series.points]
    for axis, values in ((axes.xaxis, [x for x, _ in points]), (axes.yaxis, [y for _, y in points])):
        integer = all(float(value).is_integer() for value in values)
        axis.set_major_locator(ticker.MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=integer))
    lowest, highest = (extreme(y for _, y in points) for extreme in (min, max))
    if chart.bars or 0 <= lowest < 0.3 * highest:
        axes.set_ylim(bottom=0)
    _label_points(axes, chart.series)
    figure.legend(
        loc="lower left",
        bbox_to_anchor=(_LEFT / _WIDTH, 0),
        ncols=legend_columns,
        borderaxespad=0,
        handlelength=3,
        frameon=False,
        fontsize=_FONT_SIZE,
        labelcolor=_INK,
    )
    return _inline(render(figure, "svg").decode(), chart, name)


def _draw_lines(axes: "Axes", all_series: tuple[Series, ...]) -> None:
    for index, series in enumerate(all_series):
        x, y = zip(*series.points, strict=True)
        axes.plot(
            x,
            y,
            label=series.name,
            color=_SERIES[index % len(_SERIES)],
            linestyle=_DASHES[index % len(_DASHES)] if series.line else "none",
            linewidth=1.8,
            marker=MARKERS[index % len(MARKERS)],
            markersize=6,
            markeredgecolor=_PAGE,
            markeredgewidth=0.8,
        )


def _draw_bars(axes: "Axes", all_series: tuple[Series, ...]) -> None:
    """Bars of one bin side by side; bins have equal widths."""
    starts = sorted({x for series in all_series for x, _ in series.points})
    width = starts[1] - starts[0] if len(starts) > 1 else 1.0
    share = width / len(all_series)
    for index, series in enumerate(all_series):
        left, heights = [x + share * index for x, _ in series.points], [y for _, y in series.points]
        color = _SERIES[index % len(_SERIES)]
        axes.bar(left, heights, 0.9 * share, align="edge", color=color, label=series.name)


def _label_points(axes: "Axes", all_series: tuple[Series, ...]) -> None:
    """Each label right of its point, or left of it where another point is in the way."""
    gap = _FONT_SIZE * axes.figure.dpi / 72
    for series in all_series:
        if not series.labels:
            continue
        pixels = axes.transData.transform(series.points)
        crowded = [any(0 < x - own[0] < 6 * gap and abs(y - own[1]) < gap for x, y in pixels) for own in pixels]
        for left in (False, True):
            side = [index for index, each in enumerate(crowded) if each is left]
            heights = separate_labels([pixels[index][1] for index in side], gap)
            for index, height in zip(side, heights, strict=True):
                axes.annotate(
                    series.labels[index],
                    series.points[index],
                    xytext=(-7 if left else 7, (height - pixels[index][1]) * 72 / axes.figure.dpi),
                    textcoords="offset points",
                    ha="right" if left else "left",
                    va="center",
                    fontsize=_FONT_SIZE - 1,
                    color=_INK,
                )


def _inline(svg: str, chart: Chart, name: str) -> str:
    """matplotlib's SVG as an element of the page: with unique ids, its colors and font, and a text alternative."""
    tag = re.search(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', svg)
    assert tag is not None
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg[tag.end() :], count=1)
    body = re.sub(r"\s*font-family: [^;\"]*;?", "", body)
    body = re.sub(r'(?<=\bid=")|(?<=url\(#)|(?<=xlink:href="#)', f"{name}-", body).replace("xlink:href", "href")
    for color, replacement in _THEME.items():
        body = body.replace(color, replacement)
    return (
        f'<svg class="chart" role="img" {tag[1]} aria-labelledby="{name}-title {name}-desc">\n'
        f'<title id="{name}-title">{escape(chart.caption)}</title>\n'
        f'<desc id="{name}-desc">{escape(chart.summary)}</desc>{body}'
    )
