"""Findings of the sections: each verdict can come out either way."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mctf.reproduce import paper, studies
from mctf.reproduce.analyses import ClassTokenResult, LargestTokenResult
from mctf.reproduce.costs import CostsByRResult, CostTableResult
from mctf.reproduce.document import Chart, Finding, Section, Verdict
from mctf.reproduce.records import Record, Result
from mctf.reproduce.studies import CappedSetting, PerImage, StudyResult, StudyRow
from mctf.reproduce.write import make_sections

AGREES, DIFFERS, CLOSE, OPEN = Verdict.AGREES, Verdict.DIFFERS, Verdict.CLOSE, Verdict.OPEN


@pytest.fixture
def results(measured) -> dict[str, Any]:
    return {name: record.result for name, record in measured[1].items()}


def section(name: str, result: Result) -> Section:
    (only,) = make_sections({name: Record(name, {}, 1.0, "", result)})
    return only


def verdicts(name: str, result: Result) -> list[Verdict]:
    return [finding.verdict for finding in section(name, result).findings]


def set_kl(
    result: StudyResult,
    values: dict[tuple[str, str], float],
    *,
    deviation: dict[tuple[str, str], float] | None = None,
    top1: Callable[[StudyRow], tuple[int, ...] | None] = lambda row: None,
) -> StudyResult:
    """The KL by group and label, 0.5 for all others; two images deviate from it by `deviation`, one up and one down."""

    def changed(row: StudyRow) -> StudyRow:
        kl, by = values.get((row.group, row.label), 0.5), (deviation or {}).get((row.group, row.label), 0.0)
        return replace(row, kl=kl, by_image=PerImage((kl - by, kl + by), top1(row)))

    return replace(result, rows=tuple(changed(row) for row in result.rows))


def test_costs_agree_or_are_named(results) -> None:
    assert verdicts("costs_methods", results["costs_methods"]) == [AGREES]
    first, *others = results["costs_methods"].rows
    first = replace(first, counted=replace(first.counted, gflops=2.0))
    (finding,) = section("costs_methods", CostTableResult((first, *others))).findings
    assert finding.verdict is DIFFERS
    assert "not DeiT-T (2.00)" in finding.text
    assert verdicts("costs_by_r", results["costs_by_r"]) == [AGREES]
    gflops = results["costs_by_r"].gflops
    changed = tuple(value + (r == 3) for r, value in enumerate(gflops["lv_vit_s"]))
    (finding,) = section("costs_by_r", CostsByRResult({**gflops, "lv_vit_s": changed})).findings
    assert finding == Finding("146 of 147 figures agree to 0.02 GFLOPs; not LV-ViT-S r = 3 (Table E).", DIFFERS)


def test_mctf_is_compared_with_tome(results) -> None:
    low = {("mctf", label): 0.1 for label in ("8", "16", "20")}
    assert verdicts("off_the_shelf", set_kl(results["off_the_shelf"], low)) == [AGREES, AGREES]
    assert verdicts("off_the_shelf", set_kl(results["off_the_shelf"], low | {("tome", "16"): 0.05}))[0] is DIFFERS
    lower = {("tome", label): 0.05 for label in ("8", "16", "20")}
    assert verdicts("off_the_shelf", set_kl(results["off_the_shelf"], low | lower)) == [DIFFERS, DIFFERS]


def test_one_r_that_is_too_close_decides_and_is_named(results) -> None:
    low = {("mctf", label): 0.1 for label in ("8", "16", "20")}
    result = set_kl(results["off_the_shelf"], low, deviation={("tome", "8"): 0.3})
    first, _ = section("off_the_shelf", result).findings
    assert first == Finding(
        "MCTF's KL against ToMe's: too close to call at r = 8, lower at r = 16, 20; "
        "at r = 16 it is 0.4000 ± 0.0000 lower, 0.1000 against 0.5000.",
        CLOSE,
    )


def test_at_equal_cost_every_r_is_named_and_the_least_certain_decides(results) -> None:
    result = results["one_step_ahead"]
    costs = {("one_step_ahead", "8"): 1.8, ("one_step_ahead", "16"): 1.2, ("previous", "8"): 2.0, ("previous", "16"): 1}
    result = replace(result, rows=tuple(replace(row, gflops=costs[row.group, row.label]) for row in result.rows))
    values = {("one_step_ahead", "8"): 0.4, ("one_step_ahead", "16"): 0.3}
    words = "KL with one-step-ahead attention against that of the previous block at equal cost: "
    findings = section("one_step_ahead", set_kl(result, values, deviation={("one_step_ahead", "8"): 0.06})).findings
    least = "r = 8 supports the paper least, 0.1000 ± 0.0600 lower."
    assert findings == (Finding(f"{words}too close to call at r = 8, lower at r = 16; {least}", CLOSE),)
    assert verdicts("one_step_ahead", set_kl(result, values)) == [AGREES]
    assert verdicts("one_step_ahead", set_kl(result, values | {("one_step_ahead", "16"): 0.6})) == [DIFFERS]


def test_criteria_are_compared(results) -> None:
    assert verdicts("criteria", set_kl(results["criteria"], {("sim+info+size", "16"): 0.1, ("sim", "16"): 0.2})) == [
        AGREES,
        AGREES,
    ]
    assert verdicts("criteria", set_kl(results["criteria"], {("sim+info", "16"): 0.1, ("info", "16"): 0.2})) == [
        DIFFERS,
        DIFFERS,
    ]


def test_design_choices_are_judged_where_the_paper_has_them(results) -> None:
    """Variants that the paper does not report, such as exact attention, get no verdict, however good."""
    best = {("matching", "one_way"): 0.1, ("pooling", "weighted_average"): 0.1, ("attention", "exact"): 0.1}
    findings = section("design", set_kl(results["design"], best)).findings
    assert [finding.verdict for finding in findings] == [DIFFERS, AGREES, OPEN, CLOSE, OPEN, OPEN]
    assert [finding.text.split(":")[0] for finding in findings] == [
        "Matching",
        "Pooling",
        "Pooling",
        "Attention of fused tokens",
        "Attention of fused tokens",
        "Attention logits",
    ]


def test_findings_contain_their_numbers(results) -> None:
    values = {("matching", "one_way"): 0.4, ("pooling", "weighted_average"): 0.25, ("pooling", "average"): 0.75}
    result = set_kl(results["design"], values, deviation={("matching", "one_way"): 0.01, ("pooling", "average"): 0.02})
    matching, pooling, *_ = (finding.text for finding in section("design", result).findings)
    assert matching == "Matching: bidirectional has a KL of 0.5000; one-way has 0.1000 ± 0.0100 less."
    assert pooling == (
        "Pooling: weighted by attention and size has a KL of 0.2500; its strongest rival, average, "
        "has 0.5000 ± 0.0200 more."
    )
    low = {("mctf", label): 0.125 for label in ("8", "16", "20")}
    first, *_ = section("off_the_shelf", set_kl(results["off_the_shelf"], low)).findings
    assert first.text == (
        "MCTF's KL against ToMe's: lower at r = 8, 16, 20; at r = 16 it is 0.3750 ± 0.0000 lower, "
        "0.1250 against 0.5000."
    )


@pytest.mark.parametrize(("deviation", "verdict"), [(0.049, DIFFERS), (0.051, CLOSE)])
def test_less_than_two_standard_errors_is_too_close_to_call(results, deviation: float, verdict: Verdict) -> None:
    """Two images that deviate by x from their mean have a standard error of x."""
    one_way = ("matching", "one_way")
    assert verdicts("design", set_kl(results["design"], {one_way: 0.4}, deviation={one_way: deviation}))[0] is verdict


def test_accuracy_is_compared_image_by_image_with_labels(results) -> None:
    def top1(row: StudyRow) -> tuple[int, ...]:
        return (0, 100, 100, 0) if row.label == "one_way" else (100, 0, 100, 100)

    result = set_kl(results["design"], {}, top1=top1)
    matching, *_ = (finding.text for finding in section("design", result).findings)
    assert matching.endswith("one-way has 0.0000 ± 0.0000 more, and a top-1 25.0 ± 47.9 points lower.")


def test_capped_settings_are_noted(results) -> None:
    result = replace(results["criteria"], capped=(CappedSetting("tome", 20, (11, 12)),))
    note = section("criteria", result).notes[-1]
    assert note == "ToMe at r = 20 is capped (too few tokens) in blocks 11 to 12, counted from 1."


def test_temperatures_are_judged_by_their_defaults(results) -> None:
    best = dict.fromkeys(studies.DEFAULTS.items(), 0.1)
    assert verdicts("temperatures", set_kl(results["temperatures"], best)) == [AGREES, AGREES, AGREES]
    best = best | {("tau_info", "1"): 0.05}
    assert verdicts("temperatures", set_kl(results["temperatures"], best)) == [AGREES, DIFFERS, AGREES]
    unsure = set_kl(results["temperatures"], best, deviation={("tau_info", "1"): 0.2, ("tau_size", "1"): 0.3})
    assert verdicts("temperatures", unsure) == [AGREES, CLOSE, CLOSE]


def test_the_order_of_criteria_is_compared(results) -> None:
    cosine = paper.class_token_cosine()
    last = {name: (values[-1],) * 2 for name, values in cosine.items()}
    assert verdicts("class_token", ClassTokenResult(2, 16, cosine, last)) == [AGREES]
    last["info"] = (0.9153 - 0.05, 0.9153 + 0.05)
    (finding,) = section("class_token", ClassTokenResult(2, 16, cosine, last)).findings
    assert finding.verdict is CLOSE
    assert finding.text.endswith(
        "the paper's order; its least certain step, sim over info, is 0.0542 ± 0.0500 of cosine here."
    )
    cosine["size"], last["size"] = (*cosine["size"][:-1], 0.99), (0.99, 0.99)
    (finding,) = section("class_token", ClassTokenResult(2, 16, cosine, last)).findings
    assert finding.verdict is DIFFERS
    assert finding.text.startswith("From the highest cosine to the lowest: size > sim+info+size > sim+info")
    assert finding.text.endswith("over size, is -0.0056 ± 0.0000 of cosine here.")


def test_the_largest_token_is_compared_and_every_image_is_in_the_histogram() -> None:
    def result(with_size: tuple[int, ...], without_size: tuple[int, ...]) -> LargestTokenResult:
        return LargestTokenResult(4, 16, {"with_size": with_size, "without_size": without_size})

    largest = section("largest_token", result((3, 17, 40, 5), (9, 60, 60, 20)))
    text = "With the size criterion the largest token is 21.0 ± 7.9 patches smaller: 16.2 against 37.2."
    assert largest.findings == (Finding(text, AGREES),)
    (chart,) = [part for part in largest.parts if isinstance(part, Chart)]
    assert [sum(height for _, height in series.points) for series in chart.series] == [4, 4]
    assert verdicts("largest_token", result((9, 60, 60, 20), (3, 17, 40, 5))) == [DIFFERS]
    assert verdicts("largest_token", result((3, 17, 40, 5), (9, 60, 10, 5))) == [CLOSE]


def test_a_model_without_classifier_has_no_findings_on_predictions(results) -> None:
    missing: dict[str, Any] = {"kl": None, "agreement": None, "top1": None, "top5": None, "by_image": PerImage()}
    for study in studies.STUDIES:
        result = results[study.name]
        rows = tuple(replace(row, **missing) for row in result.rows)
        content = section(study.name, replace(result, base=replace(result.base, **missing), rows=rows))
        assert content.findings == ()
        assert any(note.startswith("The model has no classifier") for note in content.notes)
        assert not any(isinstance(part, Chart) for part in content.parts)
