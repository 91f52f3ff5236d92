"""Tables as HTML: every number lies under a head that says what it is and where it comes from."""

from collections.abc import Iterator
from itertools import groupby

from .badges import badge, common_origin
from .content import Column, Origin, Table
from .markup import Markup, tag

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
