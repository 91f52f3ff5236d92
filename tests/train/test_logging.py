"""The log: means over steps, in CSV and for TensorBoard, and no line twice."""

import sys
from pathlib import Path

import pytest

from helpers.train_feeds import ALONE, finish_logged, make_recipe, make_trainer, read_log
from mctf import MctfError
from mctf.train.build import start_run
from mctf.train.logging import Logs


def test_a_line_is_the_mean_of_its_steps(tmp_path: Path) -> None:
    for folder, log_steps in (("a", 1), ("b", 3)):
        finish_logged(make_trainer(tmp_path / folder, log_steps=log_steps))
    single, mean = read_log(tmp_path / "a"), read_log(tmp_path / "b")
    assert [row["step"] for row in mean] == [3, 6, 9]
    for index, row in enumerate(mean):
        part = single[3 * index : 3 * index + 3]
        for name in ("total", "cross_entropy", "lighter_cross_entropy", "distance", "confident", "grad_norm"):
            assert row[name] == pytest.approx(sum(each[name] for each in part) / 3, rel=1e-5), name
        terms = row["cross_entropy"] + row["lighter_cross_entropy"] + row["distance"]
        assert row["total"] == pytest.approx(terms, rel=1e-5)
        assert row["epoch"] == index + 1
        assert row["distillation"] is None


def test_lines_of_later_steps_and_incomplete_lines_are_dropped(tmp_path: Path) -> None:
    finish_logged(make_trainer(tmp_path, epochs=1))
    path = tmp_path / "log.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines) + "\n2,0.1")
    Logs(tmp_path, done=2).close()
    assert path.read_text().splitlines() == lines[:3]


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    finish_logged(make_trainer(tmp_path, epochs=1))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    events = [(event.step, event.value) for event in board.Scalars("train/total")]
    assert events == [(row["step"], pytest.approx(row["total"])) for row in read_log(tmp_path)]


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MctfError, match=r"cannot be written to .*: choose another --output"):
        Logs(tmp_path / "file")


@pytest.mark.parametrize(("package", "subject"), [("tensorboard", "training logs"), ("tomli_w", "recipe files")])
def test_a_missing_extra_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, subject: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("mctf.train.build.build_trainer", pytest.fail)
    with pytest.raises(MctfError, match=rf"{subject} need {package}, .*: pip install 'mctf\[train\]'"):
        start_run(make_recipe(tmp_path), ALONE)
