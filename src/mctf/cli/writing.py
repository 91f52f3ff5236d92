"""Result files: checked before the work begins, complete or not there at all."""

import os
import tempfile
from pathlib import Path

from ..errors import MctfError


def check_writable(path: Path | None) -> None:
    """Raise MctfError if a file could not be written there; None is fine."""
    if path is None:
        return
    if path.is_dir():
        raise MctfError(f"{path} is a folder: give the name of a file to write")
    if not path.parent.is_dir():
        raise MctfError(f"there is no folder {path.parent} to write {path.name} into: make it first")
    if not os.access(path.parent, os.W_OK):
        raise MctfError(f"{path.parent} cannot be written to: choose another folder for {path.name}")


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name beside it, then rename: nobody ever sees half a file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp keeps its files private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
