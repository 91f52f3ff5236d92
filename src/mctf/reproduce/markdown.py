"""The report as Markdown: the same sections, tables and findings; charts are in the page alone."""

from collections.abc import Iterable, Iterator

from . import paper
from .document import Chart, Column, Origin, Part, Section, Strip, Table, Verdict, Viewer
from .page import TITLE, Report, tally

_VERDICTS = {
    Verdict.AGREES: "as in the paper",
    Verdict.DIFFERS: "unlike the paper",
    Verdict.CLOSE: "too close to call on these images",
    Verdict.OPEN: "",
}


def render_markdown(report: Report, pictures: str) -> str:
    """pictures: the folder of the pictures, as seen from the file."""
    lines = [f"# {TITLE}", "", *(f"- {name}: {value}" for name, value in report.facts.items()), ""]
    lines += [tally(report), ""] if any(section.findings for section in report.sections) else []
    for section in report.sections:
        lines += _section(section, pictures)
    if report.left_out:
        lines += ["## Not measured", "", *(f"- {title}: {reason}." for title, reason in report.left_out.items()), ""]
    return "\n".join([*lines, paper.origin(), ""])


def _section(section: Section, pictures: str) -> Iterator[str]:
    yield from (f"## {section.title} ({section.source})", "", section.measures, "")
    for finding in section.findings:
        verdict = _VERDICTS[finding.verdict]
        yield f"- {finding.text}" + (f" ({verdict})" if verdict else "")
    yield ""
    for part in section.parts:
        yield from _part(part, pictures)
    for note in section.notes:
        yield from (f"*{note}*", "")


def _part(part: Part, pictures: str) -> Iterator[str]:
    if isinstance(part, Table):
        yield from _table(part)
    elif isinstance(part, Strip):
        yield from (f"**{part.caption}**", "")
        yield " ".join(f"![{each.alt}]({pictures}/{each.file})" for each in part.pictures)
        yield ""
    elif isinstance(part, Viewer):
        block, place = part.start
        yield from (f"**After block {block}, r = {part.reductions[place]}.** {part.caption}", "")
        shown = [images[block - 1] for images in part.files[place]]
        yield " ".join(f"![{name}]({pictures}/{file})" for name, file in zip(part.images, shown, strict=True))
        yield ""
    elif isinstance(part, Chart):
        yield from (f"*Chart in index.html: {part.caption}. {part.summary}*", "")


def _table(table: Table) -> Iterator[str]:
    yield from (f"**{table.caption}**", "")
    yield _row(_head(column) for column in table.columns)
    yield _row("---" if column.text else "---:" for column in table.columns)
    for index, row in enumerate(table.rows):
        if index in table.headings:
            yield _row([f"*{table.headings[index]}*", *("" for _ in row[1:])])
        yield _row(f"**{cell}**" if index in table.strong and cell else cell for cell in row)
    yield ""


def _head(column: Column) -> str:
    title = ", ".join(words for words in (column.over, column.title) if words)
    return title if column.origin is Origin.NONE else f"{title} ({column.origin})"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
