"""The report: self-contained, accessible, and never mixing measured and printed numbers."""

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mctf.errors import MctfError
from mctf.reproduce import write
from mctf.reproduce.analyses import LargestTokenResult
from mctf.reproduce.document import Chart, Origin, Strip, Table, Viewer
from mctf.reproduce.records import Record
from mctf.reproduce.runner import experiments
from mctf.reproduce.studies import StudyResult
from mctf.reproduce.write import check_dependencies, make_sections, write_report

_VOID = {"meta", "link", "img", "input"}


class Reader(HTMLParser):
    """Every element with its attributes, and the texts of each; refuses elements that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]


@pytest.fixture(scope="module")
def page(report: Path) -> Reader:
    return Reader((report / "index.html").read_text(encoding="utf-8"))


def test_the_reader_refuses_unclosed_elements() -> None:
    with pytest.raises(AssertionError):
        Reader("<p><b>bold</p>")
    with pytest.raises(AssertionError):
        Reader("<p>text")


def test_the_page_is_self_contained(report: Path, page: Reader) -> None:
    text = (report / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"(?:https?:)?//[a-z0-9.]+\.[a-z]{2,}", re.sub(r"data:[^\"]*", "", text)) == []
    assert "@import" not in text
    for _, attributes in page.elements:
        for name in ("src", "href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), value
    policy = next(each for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert str(policy["content"]).startswith("default-src 'none'")


def test_every_experiment_has_a_section_and_a_link_to_it(page: Reader) -> None:
    names = [attributes["id"] for attributes in page.all("section") if "id" in attributes]
    assert names == ["summary", *(each.name for each in experiments())]
    targets = {str(attributes["href"]).removeprefix("#") for attributes in page.all("a")}
    assert targets <= {attributes.get("id") for _, attributes in page.elements}
    assert {each.name for each in experiments()} <= targets


def test_ids_are_unique_and_references_resolve(page: Reader) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for name in ("aria-labelledby", "for"):
            for target in (attributes.get(name) or "").split():
                assert target in ids


def test_sliders_are_labelled(page: Reader) -> None:
    sliders = [attributes for attributes in page.all("input") if attributes["type"] == "range"]
    labels = {attributes["for"] for attributes in page.all("label")}
    assert len(sliders) == 2
    assert {slider["id"] for slider in sliders} == labels
    assert all(text.strip() for text in page.texts["label"])
    blocks, reductions = sliders
    assert (blocks["min"], blocks["max"], blocks["value"]) == ("1", "4", "4")
    assert (reductions["min"], reductions["max"]) == ("0", "2")


def test_every_picture_has_a_text_alternative(page: Reader) -> None:
    pictures = page.all("img")
    assert len(pictures) == 2 * 2 * 3 + 2 * 2 + 2 * 4
    assert all(attributes["alt"] for attributes in pictures)
    assert all(str(attributes["src"]).startswith("data:image/webp;base64,") for attributes in pictures)
    assert page.all("svg")
    assert all(attributes.get("role") == "img" and attributes["aria-labelledby"] for attributes in page.all("svg"))


def test_the_document_has_a_language_and_a_viewport(page: Reader) -> None:
    assert page.all("html") == [{"lang": "en"}]
    assert any(each.get("name") == "viewport" for each in page.all("meta"))
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("nav")) == 1


def test_style_follows_light_and_dark(page: Reader) -> None:
    (style,) = page.texts["style"]
    assert "prefers-color-scheme: dark" in style


def test_text_is_escaped(page: Reader) -> None:
    assert "plain <tiny>" in page.texts["dd"]


def test_columns_and_charts_have_one_origin(measured) -> None:
    """The paper's accuracy has columns of its own: a column named top-1 is the paper's or measured."""
    _, records = measured
    for section in make_sections(records):
        for part in section.parts:
            if isinstance(part, Table):
                assert all(len(row) == len(part.columns) for row in part.rows)
                for column in part.columns:
                    title = column.over + column.title
                    assert "top-1" not in title or column.origin in (Origin.PAPER, Origin.MEASURED)
            assert not isinstance(part, Chart) or part.origin in (Origin.PAPER, Origin.MEASURED)


def test_measured_columns_hold_what_was_measured(measured) -> None:
    _, records = measured
    section = next(each for each in make_sections(records) if each.name == "criteria")
    (table,) = [part for part in section.parts if isinstance(part, Table)]
    rows = [row for row in records["criteria"].result.rows if row.r == 16]
    kl = next(index for index, column in enumerate(table.columns) if column.title == "KL")
    assert [row[kl] for row in table.rows] == [f"{row.kl:.4f}" for row in rows]
    assert [row[-1] for row in table.rows] == ["79.7", "79.4", "-", "79.8", "-", "-", "80.1"]


def test_pictures_are_those_of_the_results(measured) -> None:
    folder, records = measured
    section = next(each for each in make_sections(records) if each.name == "fused_patches")
    (viewer,) = [part for part in section.parts if isinstance(part, Viewer)]
    files = [file for images in viewer.files for blocks in images for file in blocks]
    strips = [picture.file for part in section.parts if isinstance(part, Strip) for picture in part.pictures]
    assert all((folder / "pictures" / file).is_file() for file in [*files, *strips])


def test_markdown_and_json_have_the_same_content(report: Path, measured) -> None:
    folder, records = measured
    markdown = (report / "report.md").read_text(encoding="utf-8")
    facts = json.loads((report / "report.json").read_text(encoding="utf-8"))
    assert list(facts["experiments"]) == [each.name for each in experiments()]
    for name, content in facts["experiments"].items():
        expected = records[name].result.to_json()
        for row in (expected["base"], *expected["rows"]) if isinstance(records[name].result, StudyResult) else ():
            assert len(row.pop("by_image")["kl"]) == expected["images"]  # only in the results folder
        assert content["result"] == json.loads(json.dumps(expected))
        assert all(finding["text"] in markdown for finding in content["findings"])
    for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", markdown):
        assert (folder / link).is_file()
    for line in markdown.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_findings_are_counted_by_verdict(tmp_path: Path, measured) -> None:
    folder, records = measured

    def chosen(with_size: tuple[int, ...], without_size: tuple[int, ...]) -> dict[str, Record]:
        sizes = LargestTokenResult(2, 16, {"with_size": with_size, "without_size": without_size})
        largest = replace(records["largest_token"], result=sizes)
        return {each: records[each] for each in ("costs_by_r", "attention_maps")} | {"largest_token": largest}

    write_report(tmp_path, {"costs_by_r": records["costs_by_r"]}, facts={}, skipped={})
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert counted(page).startswith(
        "Of 1 findings that can be compared, 1 are as in the paper (✓), 0 are not (≠) and 0"
    )
    assert counted(page).endswith("a difference counts from two standard errors (±) on.")
    (tmp_path / "pictures").symlink_to(folder / "pictures")
    write_report(tmp_path, chosen((9, 8), (5, 4)), facts={}, skipped={})
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    words = "1 are as in the paper (✓), 1 are not (≠) and 0 are too close to call on these images (≈): "
    assert f"Of 2 findings that can be compared, {words}" in counted(page)
    assert counted(page).endswith("The others (•) are not in the paper.")
    write_report(tmp_path, chosen((9, 1), (5, 6)), facts={}, skipped={})
    page, markdown = ((tmp_path / name).read_text(encoding="utf-8") for name in ("index.html", "report.md"))
    words = "Of 2 findings that can be compared, 1 are as in the paper (✓), 0 are not (≠) and 1 are too close to call"
    assert counted(page).startswith(words)
    assert counted(page) in markdown
    assert '<li class="close"><span class="mark" aria-hidden="true">≈</span>' in page
    assert "Too close to call on these images: </span>With the size criterion" in page
    assert "0.5\u00a0±\u00a04.5 patches" in page
    assert "0.5 ± 4.5 patches smaller: 5.0 against 5.5. (too close to call on these images)" in markdown
    facts = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [each["verdict"] for each in facts["experiments"]["largest_token"]["findings"]] == ["close"]


def counted(page: str) -> str:
    """The sentence that counts the findings."""
    return re.findall(r"<p class=\"measures\">(Of [^<]*)</p>", page)[0]


def test_skipped_experiments_are_listed(tmp_path: Path, measured) -> None:
    _, records = measured
    costs = {"costs_by_r": records["costs_by_r"]}
    write_report(tmp_path, costs, facts={}, skipped={"class_token": "the model has no class token"})
    for name in ("index.html", "report.md"):
        assert "Class token: the model has no class token." in (tmp_path / name).read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "report.json", "report.md"]


def test_a_missing_package_is_named_with_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check_dependencies()
    for package in ("jinja2", "matplotlib"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(MctfError, match=rf"reports need {package}, .*: pip install 'mctf\[report\]'"):
                check_dependencies()


def test_every_experiment_has_a_section() -> None:
    assert list(write._SECTIONS) == [each.name for each in experiments()]
