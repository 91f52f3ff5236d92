"""GFLOPs and parameters of the paper's rows."""

import dataclasses
import sys

import pytest

from helpers.subjects import make_task
from mctf.reproduce import costs, paper
from mctf.reproduce.costs import CostRow, CostsByRResult, Counted


def row(table: str, backbone: str, method: str) -> paper.Published:
    return next(each for each in paper.methods(table) if (each.backbone, each.method) == (backbone, method))


@pytest.mark.parametrize(
    ("table", "backbone", "method"),
    [
        ("1", "deit_tiny", "base"),
        ("1", "deit_small", "mctf"),
        ("1", "deit_small", "tome"),
        ("1", "deit_small", "evit"),
        ("2", "lv_vit_s", "base"),
        ("2", "t2t_vit_t_14", "mctf"),
        ("2", "swin_tiny", "base"),
        pytest.param("2", "pvt_small", "base", marks=pytest.mark.slow),
        pytest.param("2", "pvt_medium", "base", marks=pytest.mark.slow),
        pytest.param("2", "coat_mini", "base", marks=pytest.mark.slow),
        pytest.param("2", "poolformer_s36", "base", marks=pytest.mark.slow),
    ],
)
def test_rows_have_the_paper_s_cost(table: str, backbone: str, method: str) -> None:
    if backbone.startswith("pvt"):
        pytest.importorskip("transformers", reason='transformers is not installed: pip install "mctf[hf]"')
    published = row(table, backbone, method)
    assert CostRow(published, costs.count(published)).agrees is True


def test_another_cost_disagrees() -> None:
    published = row("1", "deit_tiny", "base")
    counted = costs.count(published)
    assert CostRow(dataclasses.replace(published, gflops=1.4), counted).agrees is False
    assert CostRow(dataclasses.replace(published, params_m=7), counted).agrees is False
    assert CostRow(dataclasses.replace(published, params_m=6.3), counted).agrees is False


def test_learned_layers_count_as_parameters() -> None:
    baseline = costs.count(row("1", "deit_small", "base"))
    learned = costs.count(row("1", "deit_small", "dynamic_vit"))
    if learned.params_m is None:
        pytest.skip("dynamic_vit is not registered")
    assert baseline.params_m is not None
    assert learned.params_m > baseline.params_m + 0.5


def test_a_row_that_cannot_be_counted_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        without = costs.count(row("2", "pvt_small", "base"))
    assert without == Counted(note='counting needs transformers: pip install "mctf[hf]"')
    published = row("1", "deit_tiny", "evo_vit")
    monkeypatch.setattr(costs, "methods", lambda: {"mctf": ""})
    unknown = costs.count(published)
    assert unknown == Counted(note="the method evo_vit is not registered")
    assert CostRow(published, unknown).agrees is None


def test_upper_bounds_and_other_settings_are_not_compared() -> None:
    published = row("1", "deit_tiny", "base")
    counted = costs.count(published)
    assert CostRow(published, dataclasses.replace(counted, at_most=True)).agrees is None
    assert CostRow(published, dataclasses.replace(counted, other_setting=True)).agrees is None


def test_a_table_has_all_rows_in_order(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "count", lambda row: Counted(gflops=row.gflops))
    task, steps = make_task(tmp_path, None)
    rows = costs.TABLE_2.run(task).rows
    assert [each.paper.backbone for each in rows] == [each.backbone for each in paper.methods("2")]
    assert sum(steps) == costs.TABLE_2.steps(task) == 18


def test_every_r_has_the_paper_s_cost(tmp_path) -> None:
    task, steps = make_task(tmp_path, None)
    result = costs.CostsByR().run(task)
    assert result.disagreements() == []
    assert sum(steps) == costs.CostsByR().steps(task)
    other = list(result.gflops["deit_tiny"])
    other[16] += 0.05
    changed = CostsByRResult({**result.gflops, "deit_tiny": tuple(other)})
    assert changed.disagreements() == [("C", "deit_tiny", 16), ("D", "deit_tiny", 16)]
