"""A folder that one process at a time writes into."""

import errno
import os
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from .errors import MctfError

LOCK_FILE = ".mctf.lock"
_UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_PAUSE = 0.02  # seconds between two looks at a folder that is held
_ATTEMPTS = 1000  # at a folder that other processes remove meanwhile
_held: set[int] = set()  # descriptors of locks


class UnlockedWarning(UserWarning):
    """The file system cannot lock files."""


class FolderHeldError(MctfError):
    """Another process holds the folder."""


@contextmanager
def lock_folder(folder: Path, *, doing: str, option: str) -> Iterator[None]:
    """Hold a folder, created if missing; raises MctfError where another process holds it.

    The system releases the lock of a process that is killed. At the end the lock file is removed, and so are folders
    that were created meanwhile, this one or in it, and are empty. A file system without locks gives a warning.
    doing: in the error message, as in "trains in". option: names another folder.
    """
    absent: list[Path] = []
    try:
        absent = [part for part in (folder, *folder.parents) if not part.exists()]
        handle = _acquire(folder, doing=doing, option=option)
    except OSError as failure:
        _remove(absent)
        raise MctfError(f"{folder} cannot be written to ({failure.strerror}): name another {option}") from None
    _held.add(handle)
    owner, before = os.getpid(), set(os.listdir(folder))
    try:
        yield
    finally:
        if os.getpid() == owner:
            with suppress(OSError):
                _remove([path for path in folder.iterdir() if path.name not in before])
                (folder / LOCK_FILE).unlink()
            _held.discard(handle)
            os.close(handle)
            _remove(absent)


@contextmanager
def wait_for_folder(folder: Path, *, seconds: float, doing: str, option: str) -> Iterator[None]:
    """`lock_folder` that waits for a process that holds the folder, at most so many seconds."""
    end = time.monotonic() + seconds
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock_folder(folder, doing=doing, option=option))
                break
            except FolderHeldError:
                if time.monotonic() > end:
                    raise
                time.sleep(_PAUSE)
        yield


def _acquire(folder: Path, *, doing: str, option: str) -> int:
    """The descriptor of the locked file. A file that its last holder removed meanwhile is no lock: another is made."""
    path = folder / LOCK_FILE
    for attempt in count(1):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except (FileNotFoundError, FileExistsError):  # its last holder removes it between two steps of these
            if attempt == _ATTEMPTS or (folder.exists() and not folder.is_dir()):
                raise
            continue
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise MctfError(f"{path} is not a regular file: remove it, or name another {option}")
            _flock(handle, folder)
            with suppress(FileNotFoundError):
                if os.fstat(handle).st_ino == path.stat().st_ino:
                    with suppress(OSError):  # on a full disk the lock holds without the number of its process
                        os.ftruncate(handle, 0)
                        os.write(handle, f"{os.getpid()}\n".encode())
                    return handle
        except BlockingIOError:
            holder = os.pread(handle, 20, 0).decode(errors="replace").strip()
            os.close(handle)
            process = f"process {holder}" if holder.isdecimal() else "another process"
            raise FolderHeldError(
                f"{process} {doing} {folder} already: wait for it, or name another {option}"
            ) from None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    raise AssertionError("count has no end")


def _flock(handle: int, folder: Path) -> None:
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as failure:
        if isinstance(failure, OSError) and failure.errno not in _UNSUPPORTED:
            raise
        text = f"{folder} is on a file system without locks: start no second run in it"
        warnings.warn(text, UnlockedWarning, stacklevel=5)


def _remove(folders: list[Path]) -> None:
    """Remove the folders that are empty; files are none."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _close_in_child() -> None:
    """A forked process, as a worker of a loader, does not keep the lock when its parent is killed."""
    for handle in _held:
        with suppress(OSError):
            os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
