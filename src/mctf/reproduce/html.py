"""HTML and SVG written by functions: text is escaped unless it is markup already."""

import base64
import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from .charts import draw
from .document import Chart, Column, Finding, Origin, Part, Section, Strip, Table, Verdict, Viewer
from .markup import Markup, join, tag, void

# MERGED from mctf.reproduce.html:
# The small word that says where numbers come from.

_WORDS = {Origin.MEASURED: "measured", Origin.COUNTED: "counted", Origin.PAPER: "paper"}


def badge(origin: Origin) -> Markup:
    """Nothing where there is nothing to say."""
    return tag("span", _WORDS[origin], class_=f"badge {origin}") if origin in _WORDS else Markup()


def common_origin(columns: Iterable[Column]) -> Origin:
    """What all columns have in common, so that it is said once; NONE where they differ."""
    origins = {column.origin for column in columns}
    return origins.pop() if len(origins) == 1 else Origin.NONE


# MERGED from mctf.reproduce.html:
# Tables as HTML: every number lies under a head that says what it is and where it comes from.

_WIDE = 9  # columns; a table with more of them is set closer


def render_table(table: Table, name: str) -> Markup:
    """name: unique in the page."""
    common = common_origin(table.columns[1:])
    # the caption stands outside, so that it stays in sight when a wide table is moved on a small screen
    caption = tag("figcaption", table.caption, " ", badge(common), id=f"{name}-caption")
    whole = tag(
        "table",
        tag("thead", *_head(table.columns, badged=not common)),
        *_bodies(table),
        aria_labelledby=f"{name}-caption",
        class_="wide" if len(table.columns) > _WIDE else None,
    )
    moved = tag("div", whole, class_="scroll", role="region", aria_labelledby=f"{name}-caption", tabindex=0)
    return tag("figure", caption, moved, class_="table")


def _head(columns: tuple[Column, ...], *, badged: bool) -> Iterator[Markup]:
    """One row, or two where columns have a title in common."""
    if not any(column.over for column in columns):
        yield tag("tr", *(_title(column, badged=badged) for column in columns))
        return
    upper, lower = [], []
    for over, group in groupby(columns, key=lambda column: column.over):
        members = list(group)
        if not over:
            upper += [_title(column, badged=badged, rows=2) for column in members]
            continue
        shared = common_origin(members)
        upper.append(_shared_title(over, shared, columns=len(members), badged=badged))
        lower += [_title(column, badged=badged and not shared) for column in members]
    yield tag("tr", *upper)
    yield tag("tr", *lower)


def _title(column: Column, *, badged: bool, rows: int | None = None) -> Markup:
    title = tag("span", column.title) if column.title else Markup()
    origin = badge(column.origin) if badged else Markup()
    return tag("th", title, origin, scope="col", rowspan=rows, class_=_classes(column))


def _shared_title(title: str, origin: Origin, *, columns: int, badged: bool) -> Markup:
    words = ["over", Origin.PAPER.value if origin is Origin.PAPER else ""]
    origin_badge = badge(origin) if badged else Markup()
    classes = " ".join(word for word in words if word)
    return tag("th", tag("span", title), origin_badge, scope="colgroup", colspan=columns, class_=classes)


def _bodies(table: Table) -> Iterator[Markup]:
    """One for every group of rows."""
    starts = sorted({0, *table.headings})
    for start, stop in zip(starts, [*starts[1:], len(table.rows)], strict=True):
        rows = [_row(table, index) for index in range(start, stop)]
        if start in table.headings:
            heading = tag("th", tag("span", table.headings[start]), scope="rowgroup", colspan=len(table.columns))
            rows.insert(0, tag("tr", heading, class_="heading"))
        yield tag("tbody", *rows)


def _row(table: Table, index: int) -> Markup:
    first, *others = zip(table.rows[index], table.columns, strict=True)
    name = tag("th", first[0], scope="row", class_="text" if first[1].text else None)
    cells = (tag("td", text, class_=_classes(column)) for text, column in others)
    return tag("tr", name, *cells, class_="strong" if index in table.strong else None)


def _classes(column: Column) -> str | None:
    words = [column.origin.value if column.origin is Origin.PAPER else "", "text" if column.text else ""]
    return " ".join(word for word in words if word) or None


# MERGED from mctf.reproduce.html:
# Sections as HTML: semantic elements, captions on every table and picture, nothing that needs a network.

MARKS = {Verdict.AGREES: "✓", Verdict.DIFFERS: "≠", Verdict.CLOSE: "≈", Verdict.OPEN: "•"}
_WORDS_html = {
    Verdict.AGREES: "As in the paper: ",
    Verdict.DIFFERS: "Unlike the paper: ",
    Verdict.CLOSE: "Too close to call on these images: ",
    Verdict.OPEN: "",
}


def render_section(section: Section, pictures: Path) -> Markup:
    """One experiment. pictures: the folder its files lie in."""
    heading = f"{section.name}-heading"
    groups = [_render(part, f"{section.name}-{index}", pictures) for index, part in enumerate(section.parts)]
    return tag(
        "section",
        tag("h2", section.title, id=heading),
        tag("p", section.measures, " ", tag("span", section.source, class_="source"), class_="measures"),
        findings(section.findings),
        *_in_rows(section.parts, groups),
        tag("ul", *(tag("li", note) for note in section.notes), class_="notes") if section.notes else Markup(),
        id=section.name,
        aria_labelledby=heading,
    )


def findings(found: tuple[Finding, ...]) -> Markup:
    """A list of sentences, each marked by whether it is what the paper says."""
    items = (tag("li", *_judged(each), class_=each.verdict.value) for each in found)
    return tag("ul", *items, class_="findings") if found else Markup()


def _judged(finding: Finding) -> tuple[Markup, ...]:
    text = finding.text.replace(" ± ", "\u00a0±\u00a0")  # a number and its error stay on one line
    return (
        tag("span", MARKS[finding.verdict], class_="mark", aria_hidden="true"),
        tag("span", tag("span", _WORDS_html[finding.verdict], class_="unseen"), text),
    )


def _in_rows(parts: tuple[Part, ...], rendered: list[Markup]) -> list[Markup]:
    """Charts that follow each other share a row where there is room."""
    out: list[Markup] = []
    for charts, group in groupby(zip(parts, rendered, strict=True), key=lambda pair: isinstance(pair[0], Chart)):
        made = [markup for _, markup in group]
        out += [tag("div", *made, class_="charts")] if charts else made
    return out


def _render(part: Part, name: str, pictures: Path) -> Markup:
    if isinstance(part, Table):
        return render_table(part, name)
    if isinstance(part, Chart):
        caption = tag("figcaption", part.caption, " ", badge(part.origin))
        return tag("figure", caption, draw(part, name=name), class_="chart")
    if isinstance(part, Strip):
        return _strip(part, pictures)
    return _viewer(part, name, pictures)


def _strip(strip: Strip, pictures: Path) -> Markup:
    items = [
        tag(
            "figure",
            void("img", src=data_uri(pictures / each.file), alt=each.alt),
            tag("figcaption", each.caption),
        )
        for each in strip.pictures
    ]
    return tag("figure", tag("figcaption", strip.caption), tag("div", *items, class_="strip"), class_="strips")


def _viewer(viewer: Viewer, name: str, pictures: Path) -> Markup:
    block, place = viewer.start
    depth = len(viewer.tokens[0])
    block_id, place_id, output_id = f"{name}-block", f"{name}-r", f"{name}-output"
    controls = tag(
        "div",
        tag("label", "Block", for_=block_id),
        void("input", type="range", id=block_id, min=1, max=depth, value=block, step=1),
        tag("label", "r, tokens fused a block", for_=place_id),
        void("input", type="range", id=place_id, min=0, max=len(viewer.reductions) - 1, value=place, step=1),
        tag("output", id=output_id, for_=f"{block_id} {place_id}", aria_live="polite"),
        class_="controls",
    )
    shown = []
    for number, (image, original) in enumerate(zip(viewer.images, viewer.originals, strict=True), start=1):
        first = viewer.files[place][number - 1][block - 1]
        shown.append(
            tag(
                "figure",
                void("img", src=data_uri(pictures / original), alt=f"Image {number} as the model sees it"),
                void("img", src=data_uri(pictures / first), alt=f"Image {number}, fused", class_="fused"),
                tag("figcaption", f"Image {number}: {image}"),
            )
        )
    known = {
        "reductions": viewer.reductions,
        "tokens": viewer.tokens,
        "pictures": [[[data_uri(pictures / file) for file in blocks] for blocks in images] for images in viewer.files],
    }
    return tag(
        "figure",
        tag("figcaption", viewer.caption),
        controls,
        tag("noscript", tag("p", "The sliders need JavaScript; the pictures show the last block.")),
        tag("div", *shown, class_="viewer-images"),
        tag("script", Markup(json.dumps(known)), type="application/json", class_="viewer-data"),
        class_="viewer",
    )


def data_uri(path: Path) -> str:
    """A picture as an address that holds it."""
    return f"data:image/{path.suffix[1:]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def contents(sections: tuple[Section, ...]) -> Markup:
    """Links to all sections."""
    items = (
        tag("li", tag("a", section.title, href=f"#{section.name}"), " ", tag("small", section.source))
        for section in sections
    )
    return join(tag("nav", tag("h2", "Contents", id="contents"), tag("ol", *items), aria_labelledby="contents"))
