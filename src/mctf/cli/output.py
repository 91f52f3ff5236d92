"""What a command writes: its JSON object, and files that are checked before the work starts and written atomically."""

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from .. import _utils
from .._utils import atomic_write, check_target
from ..errors import MctfError

_PIPE_WIDTH = 120


def check_outputs(*paths: Path | None, inputs: Iterable[str | Path | None] = ()) -> None:
    """Raise MctfError if one of the files could not be written, is written twice, or is an input of the command."""
    written: list[Path] = []
    for path in (path for path in paths if path is not None):
        check_target(path)
        for other in inputs:
            if other is not None and any(_same_file(path, part) for part in (str(other), *str(other).split(","))):
                raise MctfError(f"{path} is an input of this command: choose another file to write")
        if any(path.resolve() == other.resolve() for other in written):
            raise MctfError(f"{path} is to be written twice: choose another file for one of the two")
        written.append(path)


def _same_file(path: Path, other: str) -> bool:
    try:
        return path.is_file() and os.path.samefile(path, other.strip())
    except (OSError, ValueError):  # no such file
        return False


def check_folder(folder: Path, option: str, *, inputs: Iterable[str | None] = ()) -> None:
    """Raise MctfError if files could not be written there, or lie among the images that are read."""
    _utils.check_folder(folder, f"name another folder with {option}")
    for source in inputs:
        if source is not None and Path(source).is_dir() and folder.resolve().is_relative_to(Path(source).resolve()):
            raise MctfError(f"{folder} lies among the images of {source}: name another folder with {option}")


def program() -> str:
    """What to type for this program: `mctf` if the shell finds it by that name, else its path."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        called = Path(sys.executable).parent / "mctf"
        if not called.is_file():
            return f"{shlex.quote(sys.executable)} -m mctf"
    found = shutil.which("mctf")
    if not called.is_file() or (found is not None and _same_file(Path(found), str(called))):
        return "mctf"
    path = os.path.abspath(called)  # without resolving links: those of an environment lead out of it
    near = os.path.relpath(path)
    if os.sep not in near:
        near = os.path.join(os.curdir, near)  # else the shell looks for it on PATH
    return shlex.quote(path if near.startswith(os.pardir) else near)


def width() -> int:
    """Columns of the terminal, as COLUMNS says where it is set; 120 in a pipe."""
    return shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns


def echo(text: object, *, err: bool = False) -> None:
    """Print lines, wrapped between words at the width of the terminal; continued lines are indented."""
    for line in str(text).split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapped = textwrap.wrap(
            line,
            width(),
            subsequent_indent=indent,
            replace_whitespace=False,
            drop_whitespace=True,
            break_long_words=False,
            break_on_hyphens=False,
        )
        click.echo("\n".join(wrapped), err=err)


def write_text(path: Path, text: str) -> None:
    """Write the whole text or nothing."""
    atomic_write(path, text.encode())


def give_json(facts: dict[str, Any], *, file: Path | None, as_json: bool) -> None:
    """Write the JSON object into the file, if there is one, and print it with --json.

    It is also printed where the file cannot be written, as on a disk that filled up meanwhile: no result is lost.
    """
    text = json.dumps(facts, indent=2)
    try:
        if file is not None:
            write_text(file, text + "\n")
    except MctfError:
        click.echo(text)
        raise
    if as_json:
        click.echo(text)


def tell(text: object, *, err: bool = False, wrap: bool = True) -> None:
    """Print a line of a run that goes on where nobody reads it any more. wrap: False for a command to be pasted."""
    with suppress(BrokenPipeError):
        (echo if wrap else click.echo)(text, err=err)


def say_nothing(_: object) -> None:
    """In place of click.echo where stdout is reserved for JSON, and on ranks other than 0."""
