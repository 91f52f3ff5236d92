"""What a command writes: its JSON object, and files that are checked before the work starts and written atomically."""

import json
import os
from pathlib import Path
from typing import Any

import click

from .._utils import atomic_write
from ..errors import MctfError


def check_writable(path: Path) -> None:
    """Raise MctfError if a file could not be written there."""
    if path.is_dir():
        raise MctfError(f"{path} is a folder: give the name of a file to write")
    if not path.parent.is_dir():
        raise MctfError(f"there is no folder {path.parent} to write {path.name} into: create it first")
    if not os.access(path.parent, os.W_OK):
        raise MctfError(f"{path.parent} cannot be written to: choose another folder for {path.name}")


def check_folder(folder: Path, option: str) -> None:
    """Raise MctfError if files could not be written there; the folder need not exist yet."""
    nearest = next(part for part in (folder, *folder.absolute().parents) if part.exists())
    if not nearest.is_dir():
        raise MctfError(f"{nearest} is a file: name a folder with {option}")
    if not os.access(nearest, os.W_OK):
        raise MctfError(f"{nearest} cannot be written to: name another folder with {option}")


def write_text(path: Path, text: str) -> None:
    """Write the whole text or nothing."""
    atomic_write(path, text.encode())


def give_json(facts: dict[str, Any], *, file: Path | None, as_json: bool) -> None:
    """Write the JSON object into the file, if there is one, and print it with --json."""
    text = json.dumps(facts, indent=2)
    if file is not None:
        write_text(file, text + "\n")
    if as_json:
        click.echo(text)


def say_nothing(_: object) -> None:
    """In place of click.echo where stdout is reserved for JSON, and on ranks other than 0."""
