"""Small helpers that every room may use: counts in sentences, sizes as typed, files written whole."""

import errno
import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from .errors import MctfError, shown

MAX_SIDE = 1 << 16  # pixels; image formats end here, and so do token counts that a computer can hold

_NAME_BYTES = 255  # of a file's name, in every file system in use


def plural(number: int, noun: str, many: str | None = None) -> str:
    """ "1 image" or "12 images"; `many` where an s does not make the plural."""
    return f"{number} {noun if number == 1 else many or noun + 's'}"


def format_blocks(blocks: Sequence[int]) -> str:
    """Block numbers in a sentence: "block 3", "blocks 3 to 6" or "blocks 3, 6, 9"."""
    first, last = blocks[0], blocks[-1]
    if first == last:
        return f"block {first}"
    if last - first == len(blocks) - 1:
        return f"blocks {first} to {last}"
    return f"blocks {', '.join(map(str, blocks))}"


def format_counts(numbers: Sequence[int]) -> str:
    """ "78, 39, 19, then 0": a run of equal numbers at the end is written once."""
    words = [str(number) for number in numbers]
    run = len(list(takewhile(lambda word: word == words[-1], reversed(words))))
    if run == len(words):
        return words[-1]
    return ", ".join(words if run < 3 else [*words[:-run], f"then {words[-1]}"])


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its class where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def file_digest(path: Path) -> str:
    """A checksum of the content of a file; raises MctfError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as failure:
        raise MctfError(f"{path} cannot be read ({failure.strerror}): give another file") from None


def read_json(path: Path, name: str, cure: str, *, most: int = 1_000_000) -> dict[str, Any]:
    """The object in a JSON file of at most so many bytes. name: of the file in messages, which end with the cure."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device may never end
            raise MctfError(f"{name} is not a regular file: {cure}")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as failure:
        raise MctfError(f"{name} cannot be read ({failure.strerror}): {cure}") from None
    except ValueError as failure:
        if isinstance(failure, MctfError):
            raise
        raise MctfError(f"{shown(name)} is no file ({first_line(failure)}): {cure}") from None
    if len(content) > most:
        raise MctfError(f"{name} has more than {most:,} bytes: {cure}")
    try:
        facts = json.loads(content)
    except (ValueError, RecursionError) as failure:  # of JSON or UTF-8, a number of too many digits, deep nesting
        raise MctfError(f"{name} is not JSON ({first_line(failure):.80}): {cure}") from None
    if not isinstance(facts, dict):
        raise MctfError(f"{name} holds {shown(facts, 40)}: {cure}")
    return facts


def optional_import(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import a package that belongs to an extra; raises MctfError with the install line where it is missing.

    purpose: the subject of the sentence, as in "plots".
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        package = module.split(".")[0]
        raise MctfError(f"{purpose} need {package}, which is not installed: pip install 'mctf[{extra}]'") from None


def parse_image_size(value: object) -> tuple[int, int]:
    """Height and width from 384, "384", "384x512" or a pair; raises MctfError for anything else."""
    parts = (
        value.lower().split("x") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
    )
    try:
        sides = [int(str(part)) for part in parts if not isinstance(part, (bool, float))]
    except Exception:  # whatever the text of another's class raises
        sides = []
    if len(sides) != len(parts) or len(sides) not in (1, 2) or min(sides) < 1:
        raise MctfError(f"image size {shown(value)} is not a size: write 384 or 384x512 (height x width)")
    if max(sides) > MAX_SIDE:
        raise MctfError(f"image size {shown(value)} is too large: at most {MAX_SIDE:,} pixels in each direction")
    return sides[0], sides[-1]


def check_target(path: Path) -> None:
    """Raise MctfError where `atomic_write` could not write a file; nothing is written."""
    folder = _resolve(path).parent
    try:
        facts = os.stat(path)
    except OSError as failure:
        if failure.errno != errno.ENOENT:
            raise _unwritable(path, failure) from None
        if not folder.is_dir():
            named = folder if path.is_symlink() else path.parent
            raise MctfError(f"there is no folder {named} to write {path.name} into: create it first") from None
    else:
        if stat.S_ISDIR(facts.st_mode):
            raise MctfError(f"{path} is a folder: give the name of a file to write")
        if not stat.S_ISREG(facts.st_mode):
            stream = _open_stream(path, facts)
            if stream is not None:
                os.close(stream)
            return
        if not os.access(path, os.W_OK):
            raise MctfError(f"{path} is write-protected: choose another file")
    check_folder(folder, f"choose another folder for {path.name}")


def check_folder(folder: Path, cure: str) -> None:
    """Raise MctfError where no file can be created in a folder, which need not exist yet; nothing stays behind."""
    try:
        nearest = next(part for part in (folder, *folder.absolute().parents) if os.path.lexists(part))
        if not nearest.is_dir():
            raise MctfError(f"{nearest} is not a folder: {cure}")
        with tempfile.TemporaryFile(dir=nearest):  # permissions do not tell: root may write anywhere but in /proc
            pass
        for part in folder.absolute().parts:
            if len(os.fsencode(part)) > _NAME_BYTES:
                raise MctfError(f"the name {part[:20]}… is longer than {_NAME_BYTES} bytes: {cure}")
    except (OSError, ValueError) as failure:
        if isinstance(failure, MctfError):
            raise
        reason = getattr(failure, "strerror", None) or first_line(failure)
        raise MctfError(f"{folder} cannot be written to ({reason}): {cure}") from None


def atomic_write(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write under a temporary name in the same folder, then rename: a reader never sees half a file.

    A symbolic link keeps pointing where it does: its target is written. An existing file keeps its permissions. A
    terminal, a pipe or another stream is written to; disks, sockets and folders are refused.
    """
    try:
        facts = os.stat(path) if path.exists() else None
        stream = None if facts is None else _open_stream(path, facts)
        if stream is not None:
            with os.fdopen(stream, "wb") as file:
                file.write(content)
            return
        target = _resolve(path)
        temporary = target.with_name(f".{target.name[:50]}.{os.getpid()}")  # a name has at most 255 bytes
        with atomic_file(temporary, lambda: target, sync=sync) as file:
            file.write(content)
            if facts is not None:
                os.chmod(temporary, stat.S_IMODE(facts.st_mode))
    except OSError as failure:
        raise _unwritable(path, failure) from None


def _unwritable(path: Path, failure: OSError) -> MctfError:
    return MctfError(f"{path} cannot be written ({failure.strerror or failure}): choose another file")


def _resolve(path: Path) -> Path:
    """The file behind symbolic links, which need not exist; raises MctfError for links in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as failure:  # RuntimeError: links in a circle; ValueError: a null byte
        raise MctfError(f"{path} cannot be written ({first_line(failure)}): choose another file") from None


def _open_stream(path: Path, facts: os.stat_result) -> int | None:
    """A descriptor for what is written to and not replaced: a terminal, a pipe, or the file behind stdout or stderr.

    None for any other regular file. Refuses what would be damaged, and a pipe on which opening would wait for ever.
    """
    if stat.S_ISREG(facts.st_mode):
        for stream in (sys.stdout, sys.stderr):  # `--output /dev/stdout > file`: at the place that stdout has reached
            with suppress(OSError, ValueError):
                if os.path.samestat(os.fstat(stream.fileno()), facts):
                    stream.flush()
                    return os.dup(stream.fileno())
        return None
    if not (stat.S_ISCHR(facts.st_mode) or stat.S_ISFIFO(facts.st_mode)):
        raise MctfError(f"{path} is not a regular file: choose another file")
    try:
        number = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as failure:
        if failure.errno == errno.ENXIO:
            raise MctfError(f"{path} is a pipe that no program reads: start the reader first") from None
        raise
    os.set_blocking(number, True)
    return number


@contextmanager
def atomic_file(temporary: Path, target: Callable[[], Path], *, sync: bool = False) -> Iterator[IO[bytes]]:
    """A file to write under a temporary name, renamed to `target()` when the block ends without an error.

    sync: flush the content to the disk before the rename, and the rename after it, against a power failure.
    """
    try:
        with temporary.open("wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        path = target()
        os.replace(temporary, path)
        if sync:
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
