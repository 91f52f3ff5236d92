"""Checkpoints: written atomically, verified when read, the previous one used where the last is damaged."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from mctf import MctfError
from mctf._utils import atomic_write
from mctf.train.checkpoint import Checkpoints, is_intact, read_checkpoint, step_of


def payload(step: int) -> dict[str, Any]:
    return {"step": step, "model": {"weight": torch.full((200, 50), float(step))}}


@pytest.fixture
def three(tmp_path: Path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step in (10, 20, 30):
        checkpoints.save(step, payload(step))
    return checkpoints


def steps(checkpoints: Checkpoints) -> list[int]:
    return [step_of(path) for path in checkpoints.paths()]


def test_round_trip(three: Checkpoints) -> None:
    path, damaged = three.newest()
    assert path is not None
    assert damaged == ()
    state = read_checkpoint(path)
    assert state["step"] == 30
    assert torch.equal(state["model"]["weight"], payload(30)["model"]["weight"])


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (9, 10, 11, 100_000_000):
        checkpoints.save(step, payload(step))
    assert steps(checkpoints) == [100_000_000, 11]


def test_partial_files_and_later_steps_are_removed(three: Checkpoints) -> None:
    (three.folder / "step-00000031.partial").write_bytes(b"half")
    three.save(20, payload(21))
    assert steps(three) == [20, 10]
    assert len(list(three.folder.iterdir())) == 2
    path, _ = three.newest()
    assert path is not None
    assert read_checkpoint(path)["step"] == 21


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, empty, flip])
def test_a_damaged_checkpoint_is_skipped(three: Checkpoints, damage: Any) -> None:
    last = three.paths()[0]
    assert is_intact(last)
    damage(last)
    assert not is_intact(last)
    path, damaged = three.newest()
    assert path is not None
    assert step_of(path) == 20
    assert damaged == (f"{last} is damaged: its content does not match the checksum in its name",)


def test_no_checkpoint_is_none_and_all_damaged_is_an_error(three: Checkpoints, tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere").newest() == (None, ())
    for path in three.paths():
        cut(path)
    with pytest.raises(MctfError, match=r"no checkpoint in .* is intact: start again in another folder"):
        three.newest()


@pytest.fixture
def small_files() -> Any:
    """The system refuses files of more than 20,000 bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_earlier_checkpoints(three: Checkpoints, small_files: None) -> None:
    with pytest.raises(MctfError, match=r"step 40 cannot be written \(.+\), that of step 30 is intact: make room"):
        three.save(40, payload(40))
    assert steps(three) == [30, 20, 10]
    assert all(is_intact(path) for path in three.paths())
    assert len(list(three.folder.iterdir())) == 3


def test_a_full_disk_at_the_first_checkpoint(tmp_path: Path, small_files: None) -> None:
    with pytest.raises(MctfError, match="there is no earlier one"):
        Checkpoints(tmp_path).save(1, payload(1))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MctfError, match="cannot be written"):
        Checkpoints(tmp_path / "file" / "checkpoints").save(1, payload(1))


def test_content_is_flushed_before_and_the_folder_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("sync"), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("rename"), replace(*paths)))
    Checkpoints(tmp_path).save(1, payload(1))
    atomic_write(tmp_path / "weights", b"content", sync=True)
    assert calls == ["sync", "rename", "sync"] * 2


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, small_files: None) -> None:
    path = tmp_path / "weights"
    atomic_write(path, b"before")
    with pytest.raises(MctfError, match=r"weights cannot be written \(.+\): choose another file"):
        atomic_write(path, bytes(30_000))
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
