"""Tables on the page: titles that columns share, groups of rows, and the badge for the origin of numbers."""

import re
from pathlib import Path
from xml.etree import ElementTree

from mctf.reproduce.document import Column, Origin, Report, Section, Table
from mctf.reproduce.write import render_markdown, render_page

SHARED = Table(
    "Costs",
    (
        Column("model", text=True),
        Column("MCTF", Origin.MEASURED, over="KL"),
        Column("ToMe", Origin.MEASURED, over="KL"),
        Column("", Origin.COUNTED, over="GFLOPs"),
        Column("", Origin.PAPER, over="GFLOPs"),
        Column("top-1 %", Origin.PAPER),
    ),
    (("a", "1", "2", "3", "4", "5"), ("b", "6", "7", "8", "9", "10")),
)


def report(table: Table) -> Report:
    return Report({}, (Section("name", "Title", "Table 4", "It measures.", parts=(table,)),), {})


def read(table: Table) -> ElementTree.Element:
    (text,) = re.findall(r"<table.*?</table>", render_page(report(table), Path()), re.DOTALL)
    return ElementTree.fromstring(text)


def markdown(table: Table) -> list[str]:
    return render_markdown(report(table), "pictures").splitlines()


def words(cell: ElementTree.Element) -> list[str]:
    return [text for text in cell.itertext() if text.strip()]


def test_columns_with_a_shared_title_are_below_it() -> None:
    upper, lower = read(SHARED).findall("thead/tr")
    assert [words(cell) for cell in upper] == [
        ["model"],
        ["KL", "measured"],  # once for both
        ["GFLOPs"],
        ["top-1 %", "paper"],
    ]
    assert [words(cell) for cell in lower] == [["MCTF"], ["ToMe"], ["counted"], ["paper"]]
    assert [cell.get("colspan") for cell in upper] == [None, "2", "2", None]
    assert [cell.get("rowspan") for cell in upper] == ["2", None, None, "2"]


def test_header_cells_cover_every_column() -> None:
    table = read(SHARED)
    upper, lower = table.findall("thead/tr")
    assert sum(int(cell.get("colspan", 1)) for cell in upper) == len(SHARED.columns)
    alone = sum(cell.get("rowspan") == "2" for cell in upper)
    assert alone + len(lower) == len(SHARED.columns)
    assert all(len(row) == len(SHARED.columns) for row in table.iterfind("tbody/tr"))


def test_a_table_without_shared_titles_has_one_header_row() -> None:
    single = Table("Single", (Column("r"), Column("KL", Origin.MEASURED)), (("1", "0.1"),))
    (head,) = read(single).findall("thead/tr")
    assert [words(cell) for cell in head] == [["r"], ["KL"]]  # the badge is in the caption


def test_rows_are_grouped_under_headings() -> None:
    columns = (Column("variant", text=True), Column("KL", Origin.MEASURED))
    rows = tuple((name, "1") for name in "abcd")
    grouped = Table("Groups", columns, rows, frozenset({3}), {0: "First", 3: "Second"})
    bodies = [[words(row) for row in body] for body in read(grouped).findall("tbody")]
    assert bodies == [[["First"], ["a", "1"], ["b", "1"], ["c", "1"]], [["Second"], ["d", "1"]]]
    assert [row.get("class") for row in read(grouped).findall("tbody/tr")][-1] == "strong"
    assert [line for line in markdown(grouped) if line.startswith("| *")] == [
        "| *First* |  |",
        "| *Second* |  |",
        "| **d** | **1** |",
    ]


def test_wide_tables_have_less_padding() -> None:
    wide = Table("Wide", tuple(Column(str(index)) for index in range(12)), ())
    assert (read(wide).get("class"), read(SHARED).get("class")) == ("wide", None)


def test_markdown_has_both_titles() -> None:
    heads = (
        "| model | KL, MCTF (measured) | KL, ToMe (measured) | GFLOPs (counted) | GFLOPs (paper) | top-1 % (paper) |"
    )
    assert markdown(SHARED)[markdown(SHARED).index("**Costs**") + 2] == heads


def test_markdown_escapes_cells() -> None:
    assert "| a\\|b | 1 |" in markdown(Table("Pipes", (Column("x", text=True), Column("y")), (("a|b", "1"),)))
