"""Result files: checked before the work begins, and complete or not there at all."""

import os
from pathlib import Path

from ..errors import MctfError


def check_writable(path: Path) -> None:
    """Raise MctfError if a file could not be written there."""
    if path.is_dir():
        raise MctfError(f"{path} is a folder: give the name of a file to write")
    if not path.parent.is_dir():
        raise MctfError(f"there is no folder {path.parent} to write {path.name} into: make it first")
    if not os.access(path.parent, os.W_OK):
        raise MctfError(f"{path.parent} cannot be written to: choose another folder for {path.name}")


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name beside it, then rename: nobody ever sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as failure:
        raise MctfError(f"{path} cannot be written ({failure.strerror}): choose another file") from None
    finally:
        temporary.unlink(missing_ok=True)
