"""What sections conclude from results: each conclusion can be either."""

import copy
from typing import Any

import pytest

from mctf.reproduce import paper, studies
from mctf.reproduce.catalogue import sections
from mctf.reproduce.document import Chart, Finding, Section, Verdict
from mctf.reproduce.records import Record

AGREES, DIFFERS, CLOSE, OPEN = Verdict.AGREES, Verdict.DIFFERS, Verdict.CLOSE, Verdict.OPEN


@pytest.fixture
def results(known) -> dict[str, Any]:
    return {name: copy.deepcopy(record.result) for name, record in known[1].items()}


def section(name: str, result: Any) -> Section:
    (made,) = sections({name: Record(name, {}, 1.0, "", result)})
    return made


def verdicts(name: str, result: Any) -> list[Verdict]:
    return [finding.verdict for finding in section(name, result).findings]


def set_kl(
    result: Any, values: dict[tuple[str, str], float], *, apart: dict[tuple[str, str], float] | None = None
) -> Any:
    """KL by group and label; 0.5 for all others. apart: by how much two images differ from it, as far as they do."""
    for row in result["rows"]:
        place = (row["group"], row["label"])
        row["kl"], off = values.get(place, 0.5), (apart or {}).get(place, 0.0)
        row["by_image"] = {"kl": [row["kl"] - off, row["kl"] + off], "top1": None}
    return result


def test_costs_agree_or_are_named(results) -> None:
    assert verdicts("costs_methods", results["costs_methods"]) == [AGREES]
    results["costs_methods"]["rows"][0]["counted"]["gflops"] = 2.0
    (finding,) = section("costs_methods", results["costs_methods"]).findings
    assert finding.verdict is DIFFERS
    assert "not DeiT-T (2.00)" in finding.text
    assert verdicts("costs_by_r", results["costs_by_r"]) == [AGREES]
    results["costs_by_r"]["gflops"]["lv_vit_s"][3] += 1
    (finding,) = section("costs_by_r", results["costs_by_r"]).findings
    assert finding == Finding("146 of 147 figures come out to 0.02 GFLOPs; not LV-ViT-S r = 3 (Table E).", DIFFERS)


def test_mctf_beats_tome_or_not(results) -> None:
    low = {("mctf", label): 0.1 for label in ("8", "16", "20")}
    assert verdicts("off_the_shelf", set_kl(results["off_the_shelf"], low)) == [AGREES, AGREES]
    assert verdicts("off_the_shelf", set_kl(results["off_the_shelf"], low | {("tome", "16"): 0.05}))[0] is DIFFERS
    lower = {("tome", label): 0.05 for label in ("8", "16", "20")}
    assert verdicts("off_the_shelf", set_kl(results["off_the_shelf"], low | lower)) == [DIFFERS, DIFFERS]


def test_one_r_that_is_too_close_leaves_every_r_open_and_is_named(results) -> None:
    low = {("mctf", label): 0.1 for label in ("8", "16", "20")}
    result = set_kl(results["off_the_shelf"], low, apart={("tome", "8"): 0.3})
    first, _ = section("off_the_shelf", result).findings
    assert first == Finding(
        "MCTF's KL against ToMe's: too close to call at r = 8, lower at r = 16, 20; "
        "at r = 16 it is 0.4000 ± 0.0000 lower, 0.1000 against 0.5000.",
        CLOSE,
    )


def test_at_equal_cost_every_r_is_named_and_the_least_certain_decides(results) -> None:
    result = results["one_step_ahead"]
    costs = {("one_step_ahead", "8"): 1.8, ("one_step_ahead", "16"): 1.2, ("previous", "8"): 2.0, ("previous", "16"): 1}
    for row in result["rows"]:
        row["gflops"] = costs[row["group"], row["label"]]
    values = {("one_step_ahead", "8"): 0.4, ("one_step_ahead", "16"): 0.3}
    words = "KL with the coming attention against that with the attention of the block before at equal cost: "
    found = section("one_step_ahead", set_kl(result, values, apart={("one_step_ahead", "8"): 0.06})).findings
    least = "r = 8 speaks least for the paper, 0.1000 ± 0.0600 lower."
    assert found == (Finding(f"{words}too close to call at r = 8, lower at r = 16; {least}", CLOSE),)
    assert verdicts("one_step_ahead", set_kl(result, values)) == [AGREES]
    assert verdicts("one_step_ahead", set_kl(result, values | {("one_step_ahead", "16"): 0.6})) == [DIFFERS]


def test_the_best_criteria_are_found(results) -> None:
    assert verdicts("criteria", set_kl(results["criteria"], {("sim+info+size", "16"): 0.1, ("sim", "16"): 0.2})) == [
        AGREES,
        AGREES,
    ]
    assert verdicts("criteria", set_kl(results["criteria"], {("sim+info", "16"): 0.1, ("info", "16"): 0.2})) == [
        DIFFERS,
        DIFFERS,
    ]


def test_design_choices_are_judged_where_the_paper_has_them(results) -> None:
    """What the paper does not have, weights by size and exact attention among them, is left open, however good."""
    best = {("matching", "one_way"): 0.1, ("pooling", "weighted_average"): 0.1, ("attention", "exact"): 0.1}
    found = section("design", set_kl(results["design"], best)).findings
    assert [finding.verdict for finding in found] == [DIFFERS, AGREES, OPEN, CLOSE, OPEN, OPEN]
    assert [finding.text.split(":")[0] for finding in found] == [
        "Matching",
        "Pooling",
        "Pooling",
        "Attention of fused tokens",
        "Attention of fused tokens",
        "Attention logits",
    ]


def test_findings_give_the_figures_they_rest_on(results) -> None:
    values = {("matching", "one_way"): 0.4, ("pooling", "weighted_average"): 0.25, ("pooling", "average"): 0.75}
    result = set_kl(results["design"], values, apart={("matching", "one_way"): 0.01, ("pooling", "average"): 0.02})
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


@pytest.mark.parametrize(("apart", "verdict"), [(0.049, DIFFERS), (0.051, CLOSE)])
def test_less_than_two_standard_errors_is_too_close_to_call(results, apart: float, verdict: Verdict) -> None:
    """Of two images that are `apart` above and below their mean the standard error is `apart`."""
    one_way = ("matching", "one_way")
    assert verdicts("design", set_kl(results["design"], {one_way: 0.4}, apart={one_way: apart}))[0] is verdict


def test_accuracy_is_compared_image_by_image_where_classes_are_known(results) -> None:
    result = set_kl(results["design"], {})
    for row in result["rows"]:
        row["by_image"]["top1"] = [0, 100, 100, 0] if row["label"] == "one_way" else [100, 0, 100, 100]
    matching, *_ = (finding.text for finding in section("design", result).findings)
    assert matching.endswith("one-way has 0.0000 ± 0.0000 more, and a top-1 25.0 ± 47.9 points lower.")


def test_where_tokens_run_out_is_said(results) -> None:
    results["criteria"]["capped"] = [{"method": "tome", "r": 20, "blocks": [11, 12]}]
    notes = section("criteria", results["criteria"]).notes
    assert notes[-1].startswith("ToMe at r = 20 has too few tokens left to fuse as many in block 11, 12 (counted")


def test_temperatures_are_judged_by_their_defaults(results) -> None:
    best = dict.fromkeys(studies.DEFAULTS.items(), 0.1)
    assert verdicts("temperatures", set_kl(results["temperatures"], best)) == [AGREES, AGREES, AGREES]
    best = best | {("tau_info", "1"): 0.05}
    assert verdicts("temperatures", set_kl(results["temperatures"], best)) == [AGREES, DIFFERS, AGREES]
    unsure = set_kl(results["temperatures"], best, apart={("tau_info", "1"): 0.2, ("tau_size", "1"): 0.3})
    assert verdicts("temperatures", unsure) == [AGREES, CLOSE, CLOSE]


def test_the_order_of_criteria_is_compared(results) -> None:
    result = results["class_token"]
    result["cosine"] = {name: list(values) for name, values in paper.class_token_cosine().items()}
    result["last"] = {name: [values[-1]] * 2 for name, values in result["cosine"].items()}
    assert verdicts("class_token", result) == [AGREES]
    result["last"]["info"] = [0.9153 - 0.05, 0.9153 + 0.05]
    (finding,) = section("class_token", result).findings
    assert finding.verdict is CLOSE
    assert finding.text.endswith(
        "the paper's order; its least certain step, sim over info, is 0.0542 ± 0.0500 of cosine here."
    )
    result["cosine"]["size"][-1], result["last"]["size"] = 0.99, [0.99, 0.99]
    (finding,) = section("class_token", result).findings
    assert finding.verdict is DIFFERS
    assert finding.text.startswith("From the least loss to the most: size > sim+info+size > sim+info")
    assert finding.text.endswith("over size, is -0.0056 ± 0.0000 of cosine here.")


def test_the_largest_token_is_smaller_or_not_and_every_image_is_in_the_histogram(results) -> None:
    sizes = {"with_size": [3, 17, 40, 5], "without_size": [9, 60, 60, 20]}
    made = section("largest_token", {"images": 4, "r": 16, "sizes": sizes})
    text = "With the size criterion the largest token is 21.0 ± 7.9 patches smaller: 16.2 against 37.2."
    assert made.findings == (Finding(text, AGREES),)
    (chart,) = [part for part in made.parts if isinstance(part, Chart)]
    assert [sum(height for _, height in series.points) for series in chart.series] == [4, 4]
    swapped = {"with_size": sizes["without_size"], "without_size": sizes["with_size"]}
    assert verdicts("largest_token", {"images": 4, "r": 16, "sizes": swapped}) == [DIFFERS]
    unsure = {"with_size": [3, 17, 40, 5], "without_size": [9, 60, 10, 5]}
    assert verdicts("largest_token", {"images": 4, "r": 16, "sizes": unsure}) == [CLOSE]


def test_a_model_without_classes_has_no_findings_on_answers(results) -> None:
    for study in studies.STUDIES:
        result = results[study.name]
        for row in (result["base"], *result["rows"]):
            row.update(kl=None, agreement=None, top1=None, top5=None, by_image={"kl": None, "top1": None})
        made = section(study.name, result)
        assert made.findings == ()
        assert any(note.startswith("The model has no classifier") for note in made.notes)
        assert not any(isinstance(part, Chart) for part in made.parts)
