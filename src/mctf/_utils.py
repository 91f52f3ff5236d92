"""Small helpers that every room may use: counts in sentences, sizes as typed, files written whole."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import IO

from .errors import MctfError, shown

MAX_SIDE = 1 << 16  # pixels; image formats end here, and so do token counts that a computer can hold


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


def atomic_write(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write under a temporary name in the same folder, then rename: a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with atomic_file(temporary, lambda: path, sync=sync) as file:
            file.write(content)
    except OSError as failure:
        raise MctfError(f"{path} cannot be written ({failure.strerror}): choose another file") from None


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
