"""The content of the report, independent of HTML and Markdown: sections of findings, tables, charts and pictures.

The numbers of a column or chart have one origin: measured here, counted from shapes, or printed in the paper.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from .runner import Experiment


class Origin(StrEnum):
    """Where numbers come from."""

    MEASURED = "measured"
    COUNTED = "counted"  # from shapes, without running the model
    PAPER = "paper"
    NONE = ""  # labels, and combinations of several columns


class Verdict(StrEnum):
    """How a finding compares with the paper's."""

    AGREES = "agrees"
    DIFFERS = "differs"
    CLOSE = "close"  # a difference of less than two standard errors
    OPEN = "open"  # the paper reports nothing to compare with


@dataclass(frozen=True)
class Finding:
    """One sentence and its verdict."""

    text: str
    verdict: Verdict = Verdict.OPEN


@dataclass(frozen=True)
class Column:
    """The head of a column. text: whether its cells are words rather than numbers.

    over: a title shared by adjacent columns; their own may then be empty.
    """

    title: str
    origin: Origin = Origin.NONE
    text: bool = False
    over: str = ""


@dataclass(frozen=True)
class Head:
    """A header cell. scope: "col", or "colgroup" for a title shared by several columns. origin: NONE if given above."""

    title: str
    origin: Origin
    scope: str = "col"
    rows: int = 1
    columns: int = 1
    text: bool = False
    paper: bool = False


@dataclass(frozen=True)
class Table:
    """Cells as displayed. The first cell of a row is its name.

    strong: indices of emphasized rows. headings: a title above the row that begins a group, by its index.
    """

    kind: ClassVar[str] = "table"

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()
    headings: Mapping[int, str] = field(default_factory=dict)

    @property
    def origin(self) -> Origin:
        """The origin of all columns but the first, NONE where they differ."""
        return _common_origin(self.columns[1:])

    @property
    def header(self) -> list[list[Head]]:
        """One row of cells, or two where columns share a title; an origin appears once, as high up as possible."""

        def head(column: Column, *, shown: bool, rows: int = 1) -> Head:
            origin, paper = column.origin if shown else Origin.NONE, column.origin is Origin.PAPER
            return Head(column.title, origin, rows=rows, text=column.text, paper=paper)

        shown = not self.origin
        if not any(column.over for column in self.columns):
            return [[head(column, shown=shown) for column in self.columns]]
        upper, lower = [], []
        for over, group in groupby(self.columns, key=lambda column: column.over):
            members = list(group)
            if not over:
                upper += [head(column, shown=shown, rows=2) for column in members]
                continue
            common = _common_origin(members)
            paper = common is Origin.PAPER
            upper.append(Head(over, common if shown else Origin.NONE, "colgroup", columns=len(members), paper=paper))
            lower += [head(column, shown=shown and not common) for column in members]
        return [upper, lower]

    @property
    def groups(self) -> Iterator[tuple[str, range]]:
        """The heading and the row indices of each group."""
        starts = sorted({0, *self.headings})
        for start, stop in zip(starts, [*starts[1:], len(self.rows)], strict=True):
            yield self.headings.get(start, ""), range(start, stop)


def _common_origin(columns: Iterable[Column]) -> Origin:
    origins = {column.origin for column in columns}
    return origins.pop() if len(origins) == 1 else Origin.NONE


@dataclass(frozen=True)
class Series:
    """Points of one line, or the bars of one kind. line: whether points are joined. labels: a word for each point."""

    name: str
    points: tuple[tuple[float, float], ...]
    line: bool = True
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chart:
    """Numbers against numbers. summary: the text alternative. bars: a histogram, x being the left edges of its bins."""

    kind: ClassVar[str] = "chart"

    caption: str
    summary: str
    origin: Origin
    x: str
    y: str
    series: tuple[Series, ...]
    bars: bool = False


@dataclass(frozen=True)
class Picture:
    """A file in the folder of pictures. alt: the text alternative."""

    file: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Strip:
    """Pictures of one image, side by side."""

    kind: ClassVar[str] = "strip"

    caption: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class Viewer:
    """Pictures selected by two sliders, block and r.

    images: their names. tokens: remaining, by r and block. files: by r, image and block. start: the initial block,
    counted from 1, and the initial index into reductions.
    """

    kind: ClassVar[str] = "viewer"

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
    """One experiment. source: tables and figures of the paper. notes: caveats of the numbers."""

    name: str
    title: str
    source: str
    measures: str
    findings: tuple[Finding, ...] = ()
    parts: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        experiment: "Experiment",
        *,
        findings: Iterable[Finding] = (),
        parts: Iterable[Part] = (),
        notes: Iterable[str] = (),
    ) -> "Section":
        source = ", ".join(experiment.sources)
        return cls(
            experiment.name, experiment.title, source, experiment.measures, tuple(findings), tuple(parts), tuple(notes)
        )


@dataclass(frozen=True)
class Report:
    """facts: what was measured and how, by heading. skipped: why experiments are missing, by their title."""

    facts: Mapping[str, str]
    sections: tuple[Section, ...]
    skipped: Mapping[str, str]

    def count(self, verdict: Verdict) -> int:
        """Findings with this verdict."""
        return sum(finding.verdict is verdict for section in self.sections for finding in section.findings)


def number(value: float | None, form: str = ".2f") -> str:
    """A number for a cell; a dash for None."""
    return "-" if value is None else format(value, form)
