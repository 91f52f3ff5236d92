"""The log: means over steps, in CSV and for TensorBoard, and no line twice."""

import sys
from pathlib import Path

import pytest

from helpers.train_feeds import finish_logged, make_trainer
from mctf import MctfError
from mctf.train.logging import Logs, read_log


def test_a_line_is_the_mean_of_its_steps(tmp_path: Path) -> None:
    for folder, every in (("a", 1), ("b", 3)):
        finish_logged(make_trainer(tmp_path / folder, log_steps=every))
    single, mean = read_log(tmp_path / "a" / "log.csv"), read_log(tmp_path / "b" / "log.csv")
    assert [row["step"] for row in mean] == [3, 6, 9]
    for index, row in enumerate(mean):
        part = single[3 * index : 3 * index + 3]
        for name in ("total", "answers", "lighter", "distance", "confident", "gradient"):
            assert row[name] == pytest.approx(sum(each[name] for each in part) / 3, rel=1e-5), name
        assert row["total"] == pytest.approx(row["answers"] + row["lighter"] + row["distance"], rel=1e-5)
        assert row["epoch"] == index + 1
        assert row["teaching"] is None


def test_lines_of_later_steps_and_cut_lines_are_dropped(tmp_path: Path) -> None:
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
    found = [(event.step, event.value) for event in board.Scalars("train/total")]
    rows = read_log(tmp_path / "log.csv")
    assert found == [(row["step"], pytest.approx(row["total"])) for row in rows]


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MctfError, match=r"cannot be written to .*: choose another --output"):
        Logs(tmp_path / "file")


def test_without_tensorboard_there_is_still_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    finish_logged(make_trainer(tmp_path, epochs=1))
    assert len(read_log(tmp_path / "log.csv")) == 3
    assert not (tmp_path / "tensorboard").exists()
