"""What the report says, before it is HTML or Markdown: sections of findings, tables, charts and pictures.

Every column and every chart says where its numbers come from: measured here, or printed in the paper. One column
never holds both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Origin(StrEnum):
    """Where numbers come from."""

    MEASURED = "measured"
    COUNTED = "counted"  # worked out from shapes, nothing run
    PAPER = "paper"
    NONE = ""  # labels, and what follows from several columns


class Verdict(StrEnum):
    """What a finding says of the paper's."""

    AGREES = "agrees"
    DIFFERS = "differs"
    CLOSE = "close"  # a difference of less than two standard errors
    OPEN = "open"  # the paper has nothing to compare with


@dataclass(frozen=True)
class Finding:
    """One sentence, and what it says of the paper's."""

    text: str
    verdict: Verdict = Verdict.OPEN


@dataclass(frozen=True)
class Column:
    """The head of a column. text: whether its cells are words rather than numbers.

    over: a title that columns side by side have in common; their own may then be empty.
    """

    title: str
    origin: Origin = Origin.NONE
    text: bool = False
    over: str = ""


@dataclass(frozen=True)
class Table:
    """Cells as they are to be read. The first cell of a row names it.

    strong: rows to be emphasised, by number. headings: words above a row that begins a group, by its number.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()
    headings: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """Points of one line, or the bars of one kind. line: whether points are joined. labels: a word for each point."""

    name: str
    points: tuple[tuple[float, float], ...]
    line: bool = True
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chart:
    """Numbers against numbers. summary: what a reader who cannot see it should know. bars: a histogram."""

    caption: str
    summary: str
    origin: Origin
    x: str
    y: str
    series: tuple[Series, ...]
    bars: bool = False


@dataclass(frozen=True)
class Picture:
    """A file in the folder of pictures. alt: what it shows, for those who cannot see it."""

    file: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Strip:
    """Pictures side by side, all of one image."""

    caption: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class Viewer:
    """Pictures to move through by two sliders: after which block, and for which r.

    images: their names. tokens: left, by r and block. files: by r, image and block. start: block and place among
    the reductions to begin with.
    """

    caption: str
    images: tuple[str, ...]
    originals: tuple[str, ...]
    reductions: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    files: tuple[tuple[tuple[str, ...], ...], ...]
    start: tuple[int, int]


Part = Table | Chart | Strip | Viewer


@dataclass(frozen=True)
class Section:
    """One experiment. source: tables and figures of the paper. notes: what a reader should know of the numbers."""

    name: str
    title: str
    source: str
    measures: str
    findings: tuple[Finding, ...] = ()
    parts: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()


def number(value: float | None, form: str = ".2f") -> str:
    """A number for a cell; a dash where there is none."""
    return "-" if value is None else format(value, form)
