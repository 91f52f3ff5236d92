"""Numbers as people say them."""

import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from .errors import MctfError


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """As in "1 image" or "12 images"; plural where an s does not make it."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def format_blocks(blocks: Sequence[int]) -> str:
    """block 3, blocks 3 to 6, or blocks 3, 6, 9."""
    first, last = blocks[0], blocks[-1]
    if first == last:
        return f"block {first}"
    if last - first == len(blocks) - 1:
        return f"blocks {first} to {last}"
    return f"blocks {', '.join(map(str, blocks))}"


def listed(numbers: Sequence[int]) -> str:
    """As in "78, 39, 19, then 0": many equal numbers at the end are said once, and so is what all of them are."""
    words = [str(number) for number in numbers]
    alike = len(list(takewhile(lambda word: word == words[-1], reversed(words))))
    if alike == len(words):
        return words[-1]
    return ", ".join(words if alike < 3 else [*words[:-alike], f"then {words[-1]}"])


# MERGED from mctf._utils:
# Files that are complete or not there at all.


def write_bytes(path: Path, content: bytes) -> None:
    """Write under a temporary name beside it, then rename: nobody ever sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as failure:
        raise MctfError(f"{path} cannot be written ({failure.strerror}): choose another file") from None
    finally:
        temporary.unlink(missing_ok=True)
