"""What sections conclude from results: each conclusion can be either."""

import copy
from typing import Any

import pytest

from mctf.analysis.reproduction import paper, studies
from mctf.analysis.reproduction.records import Record
from mctf.report.reproduction.catalogue import sections
from mctf.report.reproduction.content import Chart, Finding, Section
from mctf.report.reproduction.study_parts import lower_at_equal_cost


@pytest.fixture
def results(known) -> dict[str, Any]:
    return {name: copy.deepcopy(record.result) for name, record in known[1].items()}


def section(name: str, result: Any) -> Section:
    (made,) = sections({name: Record(name, {}, 1.0, "", result)})
    return made


def verdicts(name: str, result: Any) -> list[bool | None]:
    return [finding.agrees for finding in section(name, result).findings]


def set_kl(result: Any, values: dict[tuple[str, str], float]) -> Any:
    """KL by group and label; 0.5 for all others."""
    for row in result["rows"]:
        row["kl"] = values.get((row["group"], row["label"]), 0.5)
    return result


def test_costs_agree_or_are_named(results) -> None:
    assert verdicts("costs_methods", results["costs_methods"]) == [True]
    results["costs_methods"]["rows"][0]["counted"]["gflops"] = 2.0
    (finding,) = section("costs_methods", results["costs_methods"]).findings
    assert finding.agrees is False
    assert "not DeiT-T (2.00)" in finding.text
    assert verdicts("costs_by_r", results["costs_by_r"]) == [True]
    results["costs_by_r"]["gflops"]["lv_vit_s"][3] += 1
    (finding,) = section("costs_by_r", results["costs_by_r"]).findings
    assert finding == Finding("146 of 147 figures come out to 0.02 GFLOPs; not LV-ViT-S r = 3 (Table E).", False)


def test_mctf_beats_tome_or_not(results) -> None:
    low = {("mctf", label): 0.1 for label in ("8", "16", "20")}
    assert verdicts("off_the_shelf", set_kl(results["off_the_shelf"], low)) == [True, True]
    assert verdicts("off_the_shelf", set_kl(results["off_the_shelf"], low | {("tome", "16"): 0.05}))[0] is False
    lower = {("tome", label): 0.05 for label in ("8", "16", "20")}
    assert verdicts("off_the_shelf", set_kl(results["off_the_shelf"], low | lower)) == [False, False]


def test_equal_cost_is_read_between_the_points() -> None:
    worse = [{"gflops": 1.0, "kl": 0.1}, {"gflops": 2.0, "kl": 0.001}]
    assert lower_at_equal_cost([{"gflops": 1.5, "kl": 0.009}], worse) is True
    assert lower_at_equal_cost([{"gflops": 1.5, "kl": 0.011}], worse) is False  # though below the straight line
    assert lower_at_equal_cost([{"gflops": 2.5, "kl": 0.011}], worse) is None


def test_the_best_criteria_are_found(results) -> None:
    assert verdicts("criteria", set_kl(results["criteria"], {("sim+info+size", "16"): 0.1, ("sim", "16"): 0.2})) == [
        True,
        True,
    ]
    assert verdicts("criteria", set_kl(results["criteria"], {("sim+info", "16"): 0.1, ("info", "16"): 0.2})) == [
        False,
        False,
    ]


def test_design_choices_are_judged_where_the_paper_has_them(results) -> None:
    best = {("matching", "one_way"): 0.1, ("pooling", "weighted_average"): 0.1, ("attention", "exact"): 0.1}
    assert verdicts("design", set_kl(results["design"], best))[:3] == [False, True, None]


def test_findings_give_the_figures_they_rest_on(results) -> None:
    result = set_kl(results["design"], {("matching", "one_way"): 0.1, ("pooling", "weighted_average"): 0.25})
    matching, pooling, *_ = (finding.text for finding in section("design", result).findings)
    assert matching == "Matching: lowest KL one-way, 0.1000; the paper's choice has 0.5000."
    assert pooling == "Pooling: lowest KL weighted by attention and size, 0.2500."
    low = {("mctf", label): 0.125 for label in ("8", "16", "20")}
    first, *_ = section("off_the_shelf", set_kl(results["off_the_shelf"], low)).findings
    assert first.text == "MCTF's KL is below ToMe's at every r; at r = 16 0.1250 against 0.5000."


def test_where_tokens_run_out_is_said(results) -> None:
    results["criteria"]["capped"] = [{"method": "tome", "r": 20, "blocks": [11, 12]}]
    notes = section("criteria", results["criteria"]).notes
    assert notes[-1].startswith("ToMe at r = 20 has too few tokens left to fuse as many in block 11, 12 (counted")


def test_temperatures_are_judged_by_their_defaults(results) -> None:
    best = dict.fromkeys(studies.DEFAULTS.items(), 0.1)
    assert verdicts("temperatures", set_kl(results["temperatures"], best)) == [True, True, True]
    best = best | {("tau_info", "1"): 0.05}
    assert verdicts("temperatures", set_kl(results["temperatures"], best)) == [True, False, True]


def test_the_order_of_criteria_is_compared(results) -> None:
    results["class_token"]["cosine"] = {name: list(values) for name, values in paper.class_token_cosine().items()}
    assert verdicts("class_token", results["class_token"]) == [True]
    results["class_token"]["cosine"]["size"][-1] = 0.99
    (finding,) = section("class_token", results["class_token"]).findings
    assert finding.agrees is False
    assert finding.text.startswith("From the least loss to the most: size > sim+info+size > sim+info")


def test_the_largest_token_is_smaller_or_not_and_every_image_is_in_the_histogram(results) -> None:
    sizes = {"with_size": [3, 17, 40, 5], "without_size": [9, 60, 60, 20]}
    made = section("largest_token", {"images": 4, "r": 16, "sizes": sizes})
    assert [finding.agrees for finding in made.findings] == [True]
    (chart,) = [part for part in made.parts if isinstance(part, Chart)]
    assert [sum(height for _, height in series.points) for series in chart.series] == [4, 4]
    swapped = {"with_size": sizes["without_size"], "without_size": sizes["with_size"]}
    assert verdicts("largest_token", {"images": 4, "r": 16, "sizes": swapped}) == [False]


def test_a_model_without_classes_has_no_findings_on_answers(results) -> None:
    for study in studies.STUDIES:
        result = results[study.name]
        for row in (result["base"], *result["rows"]):
            row.update(kl=None, agreement=None, top1=None, top5=None)
        made = section(study.name, result)
        assert made.findings == ()
        assert any(note.startswith("The model has no classifier") for note in made.notes)
        assert not any(isinstance(part, Chart) for part in made.parts)
