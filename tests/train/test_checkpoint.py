"""Checkpoints: whole or not there, damage is found out, the one before is used."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from mctf import MctfError
from mctf.train import checkpoint
from mctf.train.checkpoint import Checkpoints, is_whole, read, step_of, write_whole


def payload(step: int) -> dict[str, Any]:
    return {"step": step, "model": {"weight": torch.full((200, 50), float(step))}}


@pytest.fixture
def three(tmp_path: Path) -> Checkpoints:
    """Three checkpoints of which all are kept."""
    made = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step in (10, 20, 30):
        made.save(step, payload(step))
    return made


def steps(made: Checkpoints) -> list[int]:
    return [step_of(path) for path in made.paths()]


def test_come_back_as_they_were(three: Checkpoints) -> None:
    path, damaged = three.newest()
    assert path is not None
    assert damaged == ()
    found = read(path)
    assert found["step"] == 30
    assert torch.equal(found["model"]["weight"], payload(30)["model"]["weight"])


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    made = Checkpoints(tmp_path, keep=2)
    for step in (9, 10, 11, 100_000_000):
        made.save(step, payload(step))
    assert steps(made) == [100_000_000, 11]


def test_leftovers_and_an_overtaken_past_are_removed(three: Checkpoints) -> None:
    (three.folder / "step-00000031.partial").write_bytes(b"half")
    three.save(20, payload(21))
    assert steps(three) == [20, 10]
    assert len(list(three.folder.iterdir())) == 2
    path, _ = three.newest()
    assert path is not None
    assert read(path)["step"] == 21


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, empty, flip])
def test_a_damaged_one_is_passed_over(three: Checkpoints, damage: Any) -> None:
    last = three.paths()[0]
    assert is_whole(last)
    damage(last)
    assert not is_whole(last)
    path, damaged = three.newest()
    assert path is not None
    assert step_of(path) == 20
    assert damaged == (f"{last} is damaged, its content does not have the checksum of its name",)


def test_none_at_all_is_none_and_all_damaged_is_an_error(three: Checkpoints, tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere").newest() == (None, ())
    for path in three.paths():
        cut(path)
    with pytest.raises(MctfError, match=r"no checkpoint in .* is whole: start again in another folder"):
        three.newest()


@pytest.fixture
def small_files() -> Any:
    """The system refuses files of more than 20,000 bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_earlier_ones(three: Checkpoints, small_files: None) -> None:
    with pytest.raises(MctfError, match=r"step 40 cannot be written \(.+\), that of step 30 is intact: make room"):
        three.save(40, payload(40))
    assert steps(three) == [30, 20, 10]
    assert all(is_whole(path) for path in three.paths())
    assert len(list(three.folder.iterdir())) == 3


def test_a_full_disk_at_the_first(tmp_path: Path, small_files: None) -> None:
    with pytest.raises(MctfError, match="there is no earlier one"):
        Checkpoints(tmp_path).save(1, payload(1))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MctfError, match="cannot be written"):
        Checkpoints(tmp_path / "file" / "checkpoints").save(1, payload(1))


def test_the_name_comes_after_the_content_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real_sync, real_replace = checkpoint.os.fsync, checkpoint.os.replace
    monkeypatch.setattr(checkpoint.os, "fsync", lambda handle: (done.append("sync"), real_sync(handle)))
    monkeypatch.setattr(checkpoint.os, "replace", lambda *paths: (done.append("rename"), real_replace(*paths)))
    Checkpoints(tmp_path).save(1, payload(1))
    assert done == ["sync", "rename", "sync"]


def test_other_files_are_whole_or_as_they_were(tmp_path: Path, small_files: None) -> None:
    path = tmp_path / "weights"
    write_whole(path, b"before")
    with pytest.raises(MctfError, match=r"weights cannot be written \(.+\): choose another --output"):
        write_whole(path, bytes(30_000))
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
