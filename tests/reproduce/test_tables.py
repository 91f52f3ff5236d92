"""Tables as HTML: heads that columns share, groups of rows, and the word on where numbers come from."""

from xml.etree import ElementTree

from mctf.reproduce.document import Column, Origin, Table
from mctf.reproduce.html import render_table
from mctf.reproduce.markdown import render_markdown
from mctf.reproduce.page import Report, Section

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


def read(table: Table) -> ElementTree.Element:
    found = ElementTree.fromstring(render_table(table, "here")).find("div/table")
    assert found is not None
    return found


def words(cell: ElementTree.Element) -> list[str]:
    return [text for text in cell.itertext() if text.strip()]


def test_columns_that_share_a_title_lie_under_it() -> None:
    upper, lower = read(SHARED).findall("thead/tr")
    assert [words(cell) for cell in upper] == [
        ["model"],
        ["KL", "measured"],  # said once for both
        ["GFLOPs"],
        ["top-1 %", "paper"],
    ]
    assert [words(cell) for cell in lower] == [["MCTF"], ["ToMe"], ["counted"], ["paper"]]
    assert [cell.get("colspan") for cell in upper] == [None, "2", "2", None]
    assert [cell.get("rowspan") for cell in upper] == ["2", None, None, "2"]


def test_heads_cover_every_column() -> None:
    table = read(SHARED)
    upper, lower = table.findall("thead/tr")
    assert sum(int(cell.get("colspan", 1)) for cell in upper) == len(SHARED.columns)
    alone = sum(cell.get("rowspan") == "2" for cell in upper)
    assert alone + len(lower) == len(SHARED.columns)
    assert all(len(row) == len(SHARED.columns) for row in table.iterfind("tbody/tr"))


def test_a_table_without_shared_titles_has_one_row_of_heads() -> None:
    plain = Table("Plain", (Column("r"), Column("KL", Origin.MEASURED)), (("1", "0.1"),))
    (head,) = read(plain).findall("thead/tr")
    assert [words(cell) for cell in head] == [["r"], ["KL"]]  # the caption says that all of it is measured


def test_rows_stand_in_groups_under_headings() -> None:
    columns = (Column("variant", text=True), Column("KL", Origin.MEASURED))
    rows = tuple((name, "1") for name in "abcd")
    grouped = Table("Groups", columns, rows, frozenset({3}), {0: "First", 3: "Second"})
    bodies = [[words(row) for row in body] for body in read(grouped).findall("tbody")]
    assert bodies == [[["First"], ["a", "1"], ["b", "1"], ["c", "1"]], [["Second"], ["d", "1"]]]
    assert [row.get("class") for row in read(grouped).findall("tbody/tr")][-1] == "strong"
    section = Section("name", "Title", "Table 4", "It measures.", parts=(grouped,))
    lines = render_markdown(Report({}, (section,), {}), "pictures").splitlines()
    assert [line for line in lines if line.startswith("| *")] == [
        "| *First* |  |",
        "| *Second* |  |",
        "| **d** | **1** |",
    ]


def test_many_columns_are_set_closer() -> None:
    wide = Table("Wide", tuple(Column(str(index)) for index in range(12)), ())
    assert (read(wide).get("class"), read(SHARED).get("class")) == ("wide", None)


def test_markdown_names_both_titles() -> None:
    section = Section("name", "Title", "Table 1", "It measures.", parts=(SHARED,))
    text = render_markdown(Report({}, (section,), {}), "pictures")
    heads = (
        "| model | KL, MCTF (measured) | KL, ToMe (measured) | GFLOPs (counted) | GFLOPs (paper) | top-1 % (paper) |"
    )
    assert heads in text
