"""A locked folder: one process at a time, released when it ends or is killed, nothing left behind."""

import errno
import fcntl
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from mctf._locks import LOCK_FILE, FolderHeldError, UnlockedWarning, lock_folder
from mctf.errors import MctfError


def lock(folder: Path):
    return lock_folder(folder, doing="trains in", option="--output")


def test_a_second_holder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with lock(tmp_path):
        with pytest.raises(MctfError) as refused, lock(tmp_path):
            pass
        expected = f"process {os.getpid()} trains in {tmp_path} already: wait for it, or name another --output"
        assert str(refused.value) == expected
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]
    with lock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_folders_are_created_and_removed_where_they_stay_empty(tmp_path: Path) -> None:
    with lock(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with lock(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "empty").mkdir()
        (tmp_path / "a" / "file").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "file"]
    (tmp_path / "empty").mkdir()
    with lock(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir()  # it was there before


def test_a_killed_process_releases_the_lock_although_its_workers_live(tmp_path: Path) -> None:
    read, write = os.pipe()
    holder = os.fork()
    if holder == 0:
        with lock(tmp_path):
            os.write(write, f"{os.fork()}\n".encode())  # the worker writes 0
            signal.pause()
    pids = b""
    while pids.count(b"\n") < 2:
        pids += os.read(read, 100)
    worker = max(map(int, pids.split()))
    try:
        with pytest.raises(MctfError, match=f"process {holder} trains in"), lock(tmp_path):
            pass
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        with lock(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_file_system_without_locks_gives_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(handle: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with lock(tmp_path):
            pass
    assert [each.category for each in seen] == [UnlockedWarning]
    assert "without locks: start no second run in it" in str(seen[0].message)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MctfError, match=r"cannot be written to \(.+\): name another --output"), lock(tmp_path / "file"):
        pass
    with pytest.raises(MctfError, match="cannot be written to"), lock(tmp_path / "file" / "run"):
        pass


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("elsewhere", path)])
def test_something_else_under_the_name_of_the_lock(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / LOCK_FILE)
    with pytest.raises(MctfError, match="name another --output"), lock(tmp_path):
        pass
    assert os.path.lexists(tmp_path / LOCK_FILE)
    assert not (tmp_path / "elsewhere").exists()


def test_processes_that_take_turns_never_fail(tmp_path: Path) -> None:
    """Each removes the folder while others are between two steps of taking it."""
    context = multiprocessing.get_context("fork")
    barrier, failures = context.Barrier(8), context.SimpleQueue()

    def take_turns() -> None:
        barrier.wait(30)
        done = 0
        while done < 60:
            try:
                with lock(tmp_path / "held"):
                    done += 1
            except FolderHeldError:
                continue
            except BaseException as failure:
                failures.put(str(failure))
                return

    processes = [context.Process(target=take_turns) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert failures.empty(), failures.get()
    assert [process.exitcode for process in processes] == [0] * 8
