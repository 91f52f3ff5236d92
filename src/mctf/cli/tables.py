"""Results as tables for people, as wide as the terminal or, in a pipe, as wide as they need."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..core.schedule import ReductionSpec
from ..evaluation.benchmark import Result
from ..evaluation.compare import Outcome, Standing
from ..evaluation.evaluate import Row

_PIPE_WIDTH = 120
_HEADINGS = ("method", "r", "top-1 %", "top-5 %", "agree %", "KL", "cosine", "GFLOPs", "images/s")
_TIMINGS = ("contender", "ms", "spread", "images/s", "speed-up", "GFLOPs", "peak MiB", "off by")
_MEAN = "*: r differs from block to block, and this is the mean over the blocks that reduce; --json lists them"
_WORDS = ("method", "contender", "remark")  # columns that hold no numbers


def print_rows(rows: Sequence[Row], *, title: str, notes: Sequence[str]) -> None:
    """The rows of an evaluation on stdout, then its notes."""
    _print(_HEADINGS, [_cells(row) for row in rows], title, [*_footnotes(rows), *(f"note: {note}" for note in notes)])


def print_benchmark(results: Sequence[Result], *, title: str, notes: Sequence[str]) -> None:
    """The contenders of a benchmark on stdout, then what follows from them."""
    _print(_TIMINGS, [_timing_cells(each) for each in results], title, notes)


def print_outcome(outcome: Outcome, *, title: str, notes: Sequence[str]) -> None:
    """The standings of methods at equal cost on stdout below the plain model, then what follows from them."""
    rows = [[*_cells(outcome.base), "-", ""], *(_standing_cells(each) for each in outcome.standings)]
    footnotes = _footnotes([each.row for each in outcome.standings])
    _print((*_HEADINGS, "wanted", "remark"), rows, title, [*footnotes, *notes])


def _print(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str, notes: Sequence[str]) -> None:
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _WORDS else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(title, soft_wrap=True)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


def _standing_cells(standing: Standing) -> list[str]:
    entrant = standing.entrant
    remark = "untrained" if entrant.untrained else entrant.kind
    return [*_cells(standing.row), "own" if entrant.target is None else f"{entrant.target:g}", remark]


def _timing_cells(result: Result) -> list[str]:
    return [
        result.name,
        _number(result.milliseconds, ".2f"),
        _number(result.spread, ".1%"),
        _number(result.images_per_second, ",.0f"),
        _number(result.speedup, ".2f"),
        _number(result.gflops, ".2f"),
        _number(result.peak_mib, ",.0f"),
        _number(result.difference, ".2%"),
    ]


def _cells(row: Row) -> list[str]:
    numbers = (
        _number(row.top1, ".1f"),
        _number(row.top5, ".1f"),
        _number(row.agreement, ".1f"),
        _number(row.kl, ".4f"),
        _number(row.class_cosine, ".4f"),
        ("" if row.mean_tokens is None else "~") + _number(row.gflops, ".2f"),
        _number(row.images_per_second, ".1f"),
    )
    return [row.method, _reduction(row.r), *numbers]


def _reduction(r: ReductionSpec) -> str:
    """r as it was given; of a list the mean over the blocks that reduce, with a mark that `_footnotes` explains."""
    if isinstance(r, (str, int, float)):
        return str(r)
    taken = [entry for entry in r if entry]
    return f"{sum(taken) / max(1, len(taken)):.2f}*"


def _footnotes(rows: Sequence[Row]) -> list[str]:
    return [_MEAN] if any("*" in _reduction(row.r) for row in rows) else []


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
