"""Studies report the numbers of the evaluation, and run each setting once."""

from dataclasses import replace

import pytest

from helpers.subjects import make_task
from mctf.evaluation.evaluate import Row, Setting, evaluate
from mctf.reproduce import studies
from mctf.reproduce.studies import SUBSETS, CappedSetting, criteria_options


def numbers(row: Row) -> dict[str, object]:
    return {key: getattr(row, key) for key in ("kl", "kl_error", "agreement", "top1", "gflops", "r")}


def test_values_per_image_are_stored(tmp_path, subject) -> None:
    result = studies.ONE_STEP_AHEAD.run(make_task(tmp_path, subject)[0])
    expected = evaluate(
        subject.model, subject.batches, [each.setting for each in studies.ONE_STEP_AHEAD.chosen(quick=True)]
    )
    for row, scores in zip((result.base, *result.rows), expected.scores, strict=True):
        assert row.by_image.kl == pytest.approx(scores.kl.tolist(), rel=1e-5)
        assert list(row.by_image.top1) == scores.top1.tolist()
        assert sum(row.by_image.kl) / 5 == pytest.approx(row.kl, rel=1e-5)


def test_a_study_is_an_evaluation_of_its_variants(tmp_path, subject) -> None:
    task, steps = make_task(tmp_path, subject)
    result = studies.DESIGN.run(task)
    assert sum(steps) == studies.DESIGN.steps(task)
    chosen = [each.setting for each in studies.DESIGN.chosen(quick=True)]
    expected = evaluate(subject.model, subject.batches, [Setting(r=0), *chosen]).rows
    assert [numbers(row) for row in (result.base, *result.rows)] == [numbers(row) for row in expected]
    assert (result.images, result.base.kl) == (5, 0)
    assert len({row.kl for row in result.rows}) > 5


def test_a_shared_setting_runs_once(tmp_path, subject, monkeypatch: pytest.MonkeyPatch) -> None:
    run = []
    monkeypatch.setattr(studies, "evaluate", lambda _model, _batches, settings: run.append(settings) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        studies.DESIGN.run(make_task(tmp_path, subject)[0])
    assert len(run[0]) == len(set(run[0])) == 1 + len(studies.DESIGN.variants) - 3  # four groups have the same default


def test_a_setting_of_another_study_is_reused(tmp_path, subject, monkeypatch: pytest.MonkeyPatch) -> None:
    task, _ = make_task(tmp_path, subject)
    alone, before = studies.TEMPERATURE.run(task), studies.OFF_THE_SHELF.run(task)
    run = []

    def watched(model, batches, settings):
        run.extend(settings)
        return evaluate(model, batches, settings)

    monkeypatch.setattr(studies, "evaluate", watched)
    after = studies.TEMPERATURE.run(replace(task, results={"off_the_shelf": before}))
    default = Setting("mctf", studies.R)
    assert default in [each.setting for each in studies.TEMPERATURE.chosen(quick=True)]
    assert default not in run
    assert len(run) == len(set(run)) == len({each.setting for each in studies.TEMPERATURE.chosen(quick=True)})
    assert [numbers(row) for row in after.rows] == [numbers(row) for row in alone.rows]
    assert [row.by_image for row in after.rows] == [row.by_image for row in alone.rows]
    assert [(row.group, row.label) for row in after.rows] == [(row.group, row.label) for row in alone.rows]


def test_capped_blocks_are_listed_once_and_counted_from_1(subject) -> None:
    """Of 65 tokens the second block fuses 20, the third 20, and the fourth has 25, of which 12 can be fused."""
    capped = studies._capped(subject, [each.setting for each in studies.CRITERIA.variants])
    assert capped == (CappedSetting("mctf", 20, (4,)),)


@pytest.mark.parametrize("study", studies.STUDIES, ids=lambda each: each.name)
def test_quick_measures_less_and_keeps_every_group(study: studies.Study) -> None:
    quick, all_ = study.chosen(quick=True), study.chosen(quick=False)
    assert {each.group for each in quick} == {each.group for each in all_}
    assert len(quick) < len(all_) or study is studies.DESIGN
    assert any(each.setting.r == studies.R for each in quick)


def test_the_curves_that_are_compared_have_the_same_r() -> None:
    for study in (studies.OFF_THE_SHELF, studies.ONE_STEP_AHEAD):
        for quick in (False, True):
            groups: dict[str, list[object]] = {}
            for each in study.chosen(quick):
                groups.setdefault(each.group, []).append(each.setting.r)
            first, second = groups.values()
            assert first == second


def test_criteria_switch_off_what_they_do_not_name() -> None:
    assert criteria_options("sim+info+size") == {}
    assert criteria_options("info") == {"tau_sim": 0.0, "tau_size": 0.0}
    assert len(SUBSETS) == 7
