"""Fields of a recipe: how a value is read, from a command line (words) and from a TOML file (typed) alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.schedule import make_schedule
from ..errors import MctfError, did_you_mean


@dataclass(frozen=True)
class Reader:
    """Gives the value that a user meant; raises MctfError with what was expected. kind: the latter in a word."""

    kind: str
    read: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        return self.read(value)


def option(default: Any, read: Reader, text: str, *, decides: bool = True) -> Any:
    """A dataclass field with a reader and a help text. decides: whether it has a part in the trained weights."""
    metadata = {"read": read, "help": text, "decides": decides}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def optional(read: Reader) -> Reader:
    """The same, with None for what was not given."""
    return Reader(read.kind, lambda value: None if value is None else read(value))


def whole(least: int) -> Reader:
    def read(value: Any) -> int:
        number = _number(value)
        if not isinstance(number, int) or number < least:
            raise MctfError(f"expected a whole number, {least} or more")
        return number

    return Reader("INTEGER", read)


def real(least: float, most: float = float("inf"), *, above: bool = False) -> Reader:
    """A number from `least` to `most`; above: not `least` itself."""

    def read(value: Any) -> float:
        number = _number(value)
        if number is None or not least <= number <= most or (above and number == least):
            limits = f"above {least:g}" if above else f"{least:g} or more"
            raise MctfError(f"expected a number {limits}" + (f", at most {most:g}" if most < float("inf") else ""))
        return float(number)

    return Reader("NUMBER", read)


def word(*known: str) -> Reader:
    def read(value: Any) -> str:
        if value not in known:
            raise MctfError(did_you_mean(str(value), known))
        return value

    return Reader("|".join(known), read)


def _read_text(value: Any) -> str:
    """Any words but none."""
    if not isinstance(value, str) or not value:
        raise MctfError("expected a name")
    return value


def _read_place(value: Any) -> Path:
    """A path of a file or folder; whether it exists is another question."""
    if not isinstance(value, (str, Path)) or not str(value):
        raise MctfError("expected a path")
    return Path(value)


def _read_existing(value: Any) -> Path:
    """A path that exists."""
    path = _read_place(value)
    if not path.exists():
        raise MctfError("there is no such file or folder")
    return path


def _read_switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise MctfError("expected true or false")
    return value


def _read_reduction(value: Any) -> int | float | str | tuple[int | float, ...]:
    """r as `mctf.fuse` takes it: a count, a ratio, "fast", or one entry a block (a list, or commas between)."""
    if isinstance(value, str) and "," in value:
        value = value.split(",")
    several = isinstance(value, (list, tuple))
    entries = [_number(entry, entry) for entry in (value if several else [value])]
    spec: Any = tuple(entries) if several else entries[0]
    make_schedule(spec, depth=len(entries), blocks=None, default_blocks=())
    return spec


def _read_reductions(value: Any) -> tuple[int | float | str, ...]:
    """Several r, one after the other."""
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, Sequence) or not entries:
        raise MctfError("expected several r, as in 0,8,16")
    return tuple(dict.fromkeys(_single(entry) for entry in entries))


def _single(entry: Any) -> Any:
    made = _read_reduction(entry)
    if isinstance(made, tuple):
        raise MctfError("expected several r, as in 0,8,16")
    return made


def _read_blocks(value: Any) -> tuple[int, ...]:
    """Numbers of blocks."""
    entries = [_number(entry) for entry in (value.split(",") if isinstance(value, str) else value)]
    if not entries or not all(isinstance(entry, int) for entry in entries):
        raise MctfError("expected numbers of blocks, as in 3,6,9")
    return tuple(entries)


def _read_image_size(value: Any) -> tuple[int, int]:
    """384, or 384x512 as height x width; in a file also a list of the two."""
    sides = (
        value.lower().split("x") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
    )
    numbers = [_number(side) for side in sides]
    if len(numbers) not in (1, 2) or not all(isinstance(side, int) and side > 0 for side in numbers):
        raise MctfError("expected a size, 384 or 384x512 (height x width)")
    return numbers[0], numbers[-1]


def _read_table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MctfError("expected a table of names and values")
    return dict(value)


def _number(value: Any, otherwise: Any = None) -> Any:
    """A number as it is, or from its words; `otherwise` where there is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return otherwise


text = Reader("NAME", _read_text)
place = Reader("PATH", _read_place)
existing = Reader("PATH", _read_existing)
switch = Reader("FLAG", _read_switch)
reduction = Reader("R", _read_reduction)
reductions = Reader("R,R,…", _read_reductions)
blocks = Reader("I,J,…", _read_blocks)
image_size = Reader("SIZE", _read_image_size)
table = Reader("TABLE", _read_table)
