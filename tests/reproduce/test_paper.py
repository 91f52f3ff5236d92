"""The paper's figures in the package are the printed ones."""

import csv
from fractions import Fraction

import pytest

from helpers.shared_data import SHARED, needs_shared
from mctf.reproduce import paper, studies

FILES = {
    name: f"paper/{name}.csv"
    for name in ("method_comparison", "flops_accuracy_by_r", "off_the_shelf", "ablations", "class_token_cosine")
}
TABLES = {"table_sup1": "C", "table_sup2": "D", "table_sup3": "E"}


def rows(name: str) -> list[dict[str, str]]:
    with (SHARED / FILES[name]).open(newline="") as file:
        return list(csv.DictReader(file))


@needs_shared(FILES["method_comparison"])
def test_tables_1_and_2() -> None:
    printed = set()
    for row in rows("method_comparison"):
        method, _, r = row["method"].partition("_r")
        fused = method == "mctf"
        printed.add(
            (
                row["table"].removeprefix("main"),
                row["backbone"],
                method if fused else row["method"],
                int(r) if fused else None,
                float(row["gflops"]),
                float(row["params_m"]),
                float(row["top1"]),
                row["finetuned"] == "yes",
            )
        )
    ours = [*paper.methods("1"), *paper.methods("2")]
    assert len(ours) == len(printed) == 36
    assert {tuple(vars(row).values()) for row in ours} == printed


@needs_shared(FILES["flops_accuracy_by_r"])
def test_tables_c_d_and_e() -> None:
    printed = {
        (TABLES[row["table"]], row["model"], row["training"], int(row["r"])): (float(row["gflops"]), float(row["top1"]))
        for row in rows("flops_accuracy_by_r")
    }
    ours = {
        (each.table, each.backbone, each.training, r): (each.gflops[r], each.top1[r])
        for each in paper.by_r()
        for r in range(21)
    }
    assert ours == printed


@needs_shared(FILES["off_the_shelf"])
def test_table_3() -> None:
    for row in rows("off_the_shelf"):
        printed = {int(key[1:]): float(value) for key, value in row.items() if key.startswith("r")}
        assert paper.off_the_shelf(row["backbone"], row["method"]) == printed
    assert paper.off_the_shelf("deit_tiny", "evit") == {}


@needs_shared(FILES["ablations"])
def test_ablations() -> None:
    printed = [
        (row["study"], row["setting"], float(row["gflops"]) if row["gflops"] else None, float(row["top1"]))
        for row in rows("ablations")
    ]
    assert [tuple(vars(row).values()) for row in paper.ablations()] == printed


@needs_shared(FILES["class_token_cosine"])
def test_table_b() -> None:
    printed = {
        row["criteria"]: tuple(float(row[f"b{block}"]) for block in range(1, 13)) for row in rows("class_token_cosine")
    }
    assert paper.class_token_cosine() == printed


@needs_shared("paper/mctf_paper.tex.txt")
def test_the_mean_size_of_the_largest_token() -> None:
    text = (SHARED / "paper/mctf_paper.tex.txt").read_text(encoding="utf-8")
    means = paper.mean_largest_token()
    assert f"the average size of {means['with_size']}/{means['without_size']} with and without" in text


@pytest.mark.parametrize("study", [studies.CRITERIA, studies.DESIGN, studies.TEMPERATURE], ids=lambda each: each.name)
def test_every_line_of_the_ablations_has_a_variant(study: studies.Study) -> None:
    groups = {variant.group for variant in study.variants}
    names = {(variant.group, variant.label) for variant in study.variants}
    if study is studies.CRITERIA:
        names, groups = {("criteria", group) for group in groups}, {"criteria"}
    printed = {(row.study, row.setting) for row in paper.ablations() if row.study in groups}
    assert printed
    assert printed <= names


def test_the_defaults_of_temperatures_are_those_of_the_method() -> None:
    from mctf.methods.mctf import MCTF

    assert {option: getattr(MCTF(), option) for option in studies.DEFAULTS} == {
        option: float(Fraction(label)) for option, label in studies.DEFAULTS.items()
    }
