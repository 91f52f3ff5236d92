"""GFLOPs and parameters of the paper's rows."""

import dataclasses
import sys

import pytest

from helpers.subjects import make_task
from mctf.reproduce import costs, paper
from mctf.reproduce.costs import Counted


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
        ("2", "pvt_small", "base"),
        ("2", "pvt_medium", "base"),
        ("2", "swin_tiny", "base"),
        ("2", "coat_mini", "base"),
        ("2", "poolformer_s36", "base"),
    ],
)
def test_rows_have_the_paper_s_cost(table: str, backbone: str, method: str) -> None:
    if backbone.startswith("pvt"):
        pytest.importorskip("transformers", reason='transformers is not installed: pip install "mctf[hf]"')
    published = row(table, backbone, method)
    assert costs.agrees(published, costs.count(published)) is True


def test_another_cost_would_be_noticed() -> None:
    published = row("1", "deit_tiny", "base")
    counted = costs.count(published)
    assert costs.agrees(dataclasses.replace(published, gflops=1.4), counted) is False
    assert costs.agrees(dataclasses.replace(published, params_m=7), counted) is False
    assert costs.agrees(dataclasses.replace(published, params_m=6.3), counted) is False


def test_learned_layers_count_as_parameters() -> None:
    plain = costs.count(row("1", "deit_small", "base"))
    learned = costs.count(row("1", "deit_small", "dynamic_vit"))
    if learned.params_m is None:
        pytest.skip("dynamic_vit is not registered")
    assert plain.params_m is not None
    assert learned.params_m > plain.params_m + 0.5


def test_what_cannot_be_counted_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        without = costs.count(row("2", "pvt_small", "base"))
    assert without == Counted(note='it is counted with transformers: pip install "mctf[hf]"')
    published = row("1", "deit_tiny", "evo_vit")
    monkeypatch.setattr(costs, "methods", lambda: {"mctf": ""})
    unknown = costs.count(published)
    assert unknown == Counted(note="the method evo_vit is not registered")
    assert costs.agrees(published, unknown) is None


def test_upper_bounds_and_other_settings_are_not_compared() -> None:
    published = row("1", "deit_tiny", "base")
    counted = costs.count(published)
    assert costs.agrees(published, dataclasses.replace(counted, at_most=True)) is None
    assert costs.agrees(published, dataclasses.replace(counted, other_setting=True)) is None


def test_a_table_has_all_rows_in_order(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "count", lambda row: Counted(gflops=row.gflops))
    task, steps = make_task(tmp_path, None)
    found = costs.TABLE_2.run(task)["rows"]
    assert [each["paper"]["backbone"] for each in found] == [each.backbone for each in paper.methods("2")]
    assert sum(steps) == costs.TABLE_2.steps(task) == 18


def test_every_r_has_the_paper_s_cost(tmp_path) -> None:
    task, steps = make_task(tmp_path, None)
    gflops = costs.CostsByR().run(task)["gflops"]
    assert costs.far_off(gflops) == []
    assert sum(steps) == costs.CostsByR().steps(task)
    gflops["deit_tiny"][16] += 0.05
    assert costs.far_off(gflops) == [("C", "deit_tiny", 16), ("D", "deit_tiny", 16)]
