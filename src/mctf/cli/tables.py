"""Results as tables on stdout, at most as wide as the terminal, or 120 columns in a pipe."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from .._utils import plural
from ..core.schedule import ReductionSpec
from ..deploy.benchmark import FormatMeasurement
from ..errors import one_line
from ..evaluation.benchmark import Measurement
from ..evaluation.compare import Comparison
from ..evaluation.evaluate import Row
from ..evaluation.tune import Tuning
from .output import echo, width

_HEADINGS = ("method", "r", "top-1 %", "top-5 %", "agree %", "KL", "cosine", "patches", "GFLOPs", "images/s")
_TIMINGS = ("contender", "ms", "spread", "images/s", "speed-up", "GFLOPs", "peak MiB", "error")
_FORMATS = ("contender", "ms", "spread", "images/s", "speed-up", "GFLOPs", "MiB", "KL", "agree %")
_OVER_MATMUL = "over matmul"
_MEAN = "*: r differs between blocks; this is the mean over the blocks that reduce, and --json lists them"
_WHERE_KNOWN = ("patches",)  # columns that are left out where no row has a value
_TEXT_COLUMNS = ("method", "contender", "remark")
# Columns that a narrow terminal does without, the first ones first.
_OPTIONAL = ("peak MiB", "target", "remark", "cosine", "patches", "error", "images/s", "top-5 %", "spread", "GFLOPs")


def run_title(facts: dict[str, Any]) -> str:
    """The line above a table, from the facts of an `EvalRun`."""
    images = plural(facts["images"], "image")
    return f"{facts['model']} on {images} of {one_line(facts['data'])}, {facts['device']}, {facts['dtype']}"


def print_rows(rows: Sequence[Row], *, title: str, notes: Sequence[str]) -> None:
    """The rows of an evaluation, then its notes."""
    _print(_HEADINGS, [_cells(row) for row in rows], title, [*_footnotes(rows), *(f"note: {note}" for note in notes)])


def print_comparison(comparison: Comparison, *, title: str, notes: Sequence[str]) -> None:
    """The baseline and the methods at equal cost, then the notes."""
    rows = [[*_cells(comparison.baseline), "-", ""]]
    for result in comparison.results:
        candidate = result.candidate
        target = "none" if candidate.target is None else f"{candidate.target:g}"
        remark = "untrained" if candidate.untrained else candidate.kind
        rows.append([*_cells(result.row), target, remark])
    footnotes = _footnotes([result.row for result in comparison.results])
    _print((*_HEADINGS, "target", "remark"), rows, title, [*footnotes, *notes])


def print_tuning(tuning: Tuning, *, title: str) -> None:
    """The budgets of a search, the wanted one marked; the tokens that each block of it fuses."""
    rows = [
        [
            (">" if point.budget == tuning.best.budget else "") + f"{100 * point.flops:.1f}",
            f"{point.gflops:.3f}",
            f"{point.kl:.3g}",
            f"{100 * point.default_flops:.1f}",
            f"{point.default_kl:.3g}",
        ]
        for point in tuning.points
    ]
    best = tuning.best
    notes = [f">: the schedule that is written, r = {', '.join(map(str, best.tuned))}"]
    notes.append("the others are not searched as far; default: the method's own schedule at that cost")
    if tuning.speedup is not None:
        notes.append(f"measured speed-up: {tuning.speedup:.2f}")
    _print(("FLOPs %", "GFLOPs", "KL", "default FLOPs %", "default KL"), rows, title, notes)


def print_benchmark(results: Sequence[Measurement], *, title: str, notes: Sequence[str]) -> None:
    """The contenders of a benchmark, then the verdicts on them."""
    headings, rows = list(_TIMINGS), []
    for result in results:
        rows.append(
            [
                result.label,
                _number(result.milliseconds, ".2f"),
                _number(result.spread, ".1%"),
                _number(result.images_per_second, ",.0f"),
                _number(result.speedup, ".2f"),
                _number(result.gflops, ".2f"),
                _number(result.peak_mib, ",.0f"),
                _number(result.difference, ".2%"),
            ]
        )
    if any(result.speedup_over_matmul is not None for result in results):
        place = headings.index("speed-up") + 1
        headings.insert(place, _OVER_MATMUL)
        for cells, result in zip(rows, results, strict=True):
            cells.insert(place, _number(result.speedup_over_matmul, ".2f"))
    _print(headings, rows, title, notes)


def print_formats(results: Sequence[FormatMeasurement], *, title: str, notes: Sequence[str]) -> None:
    """The contenders of a benchmark over formats, then its notes."""
    rows = [
        [
            result.name,
            _number(result.milliseconds, ".2f"),
            _number(result.spread, ".1%"),
            _number(result.images_per_second, ",.1f"),
            _number(result.speedup, ".2f"),
            _number(result.gflops, ".2f"),
            _number(result.bytes / 2**20, ",.1f"),
            _number(result.kl, ".1e"),
            _number(result.agreement, ".1f"),
        ]
        for result in results
    ]
    _print(_FORMATS, rows, title, ["speed-up: over the unfused model in the same format; KL: to the first row", *notes])


def _print(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str, notes: Sequence[str]) -> None:
    """The title, a table of the columns that fit, and the notes, all within the width of the terminal."""
    console = Console(highlight=False, markup=False, emoji=False, width=width())
    unbounded = Console(width=10_000)  # a console measures nothing wider than itself
    unknown = [name for place, name in enumerate(headings) if all(row[place] == "-" for row in rows)]
    shown, left_out = [name for name in headings if name not in _WHERE_KNOWN or name not in unknown], []
    for heading in _OPTIONAL:
        if unbounded.measure(_table(headings, rows, shown)).maximum <= console.width:
            break
        if heading in shown:
            shown.remove(heading)
            left_out.append(heading)
    echo(title)
    console.width = max(console.width, unbounded.measure(_table(headings, rows, shown)).maximum)  # nothing is cut off
    console.print(_table(headings, rows, shown))
    if left_out:
        notes = [*notes, f"left out, as the terminal is narrow: {', '.join(left_out)}; --json has all columns"]
    for note in notes:
        echo(note)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[str]) -> Table:
    """The shown columns; no number is broken over two lines."""
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    places = [headings.index(heading) for heading in shown]
    for heading in shown:
        table.add_column(heading, justify="left" if heading in _TEXT_COLUMNS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[place] for place in places))
    return table


def _cells(row: Row) -> list[str]:
    return [
        row.method if row.precision is None else f"{row.method}, {row.precision}",
        _format_r(row.r),
        _number(row.top1, ".1f"),
        _number(row.top5, ".1f"),
        _number(row.agreement, ".1f"),
        _number(row.kl, ".4f"),
        _number(row.class_cosine, ".4f"),
        _number(row.patch_cosine, ".4f"),
        ("" if row.mean_tokens is None else "~") + _number(row.gflops, ".2f"),
        _number(row.images_per_second, ".1f"),
    ]


def _format_r(r: ReductionSpec) -> str:
    """r as it was given; for a list the mean over the blocks that reduce, with a mark that `_footnotes` explains."""
    if isinstance(r, (str, int, float)):
        return str(r)
    amounts = [amount for amount in r if amount]
    return f"{sum(amounts) / max(1, len(amounts)):.2f}*"


def _footnotes(rows: Sequence[Row]) -> list[str]:
    return [_MEAN] if any("*" in _format_r(row.r) for row in rows) else []


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
