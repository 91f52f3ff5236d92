"""Parsers of a recipe's values: text of the command line and typed values of TOML alike."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._utils import parse_image_size
from ..core.budget import parse_flops
from ..core.schedule import ReductionSpec, parse_blocks, parse_r
from ..errors import MctfError, did_you_mean
from ..schedule_file import find_schedule


@dataclass(frozen=True)
class Parser:
    """Returns the value that was meant, or raises MctfError.

    metavar: for `--help`. complete: whether the error names the value itself.
    """

    metavar: str
    parse: Callable[[Any], Any]
    complete: bool = False


def optional(parser: Parser) -> Parser:
    """The same, with None for an option that was not given."""
    return Parser(parser.metavar, lambda value: None if value is None else parser.parse(value), parser.complete)


def integer(low: int, high: int = 10**9) -> Parser:
    def parse(value: Any) -> int:
        number = _number(value)
        if not isinstance(number, int) or number < low:
            raise MctfError(f"expected a whole number, {low} or more")
        if number > high:
            raise MctfError(f"expected a whole number, at most {high}")
        return number

    return Parser("INTEGER", parse)


def real(low: float, high: float = sys.float_info.max, *, above: bool = False, below: bool = False) -> Parser:
    """A finite number from `low` to `high`; above: without `low` itself; below: without `high` itself."""
    limits = f"above {low:g}" if above else f"{low:g} or more"
    if high < sys.float_info.max:
        limits += f", below {high:g}" if below else f", at most {high:g}"

    def parse(value: Any) -> float:
        number = _number(value)
        if number is None or not low <= number <= high:  # as nan is not
            raise MctfError(f"expected a number {limits}")
        if (above and number == low) or (below and number == high):
            raise MctfError(f"expected a number {limits}")
        return float(number)

    return Parser("NUMBER", parse)


def _number(value: Any) -> int | float | None:
    """A number, also from text; None for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return None


def choice(*names: str) -> Parser:
    def parse(value: Any) -> str:
        if value not in names:
            raise MctfError(did_you_mean(str(value), names))
        return value

    return Parser("|".join(names), parse)


def _parse_text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise MctfError("expected a name")
    return value


def _parse_model(value: Any) -> str:
    if _parse_text(value).startswith("hf:"):
        raise MctfError("only timm models can be fine-tuned: train the transformers model in a loop of your own")
    return value


def _parse_path(value: Any) -> Path:
    if not isinstance(value, (str, Path)) or not str(value):
        raise MctfError("expected a path")
    return Path(value)


def _parse_existing(value: Any) -> Path:
    path = _parse_path(value)
    try:
        found = path.exists()
    except (OSError, ValueError) as failure:  # a name that is too long, or holds a null character
        raise MctfError(f"it cannot be a path ({getattr(failure, 'strerror', None) or failure})") from None
    if not found:
        raise MctfError("there is no such file or folder")
    return path


def _parse_schedule(value: Any) -> Path:
    """A file, or the name of a schedule of the package, which is kept as it is."""
    name = _parse_path(value)
    _parse_existing(find_schedule(name))
    return name


def _parse_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise MctfError("expected true or false")
    return value


def _parse_r_list(value: Any) -> tuple[ReductionSpec, ...]:
    """Several r, each for all blocks; duplicates are dropped."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not parts or any(isinstance(part, (list, tuple)) for part in parts):
        raise MctfError("expected several r, as in 0,8,16")
    return tuple(dict.fromkeys(parse_r(part) for part in parts))


def _parse_table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MctfError("expected a table of names and values")
    return {name: each for name, each in value.items() if each is not None}


text = Parser("NAME", _parse_text)
model_name = Parser("NAME", _parse_model)
path = Parser("PATH", _parse_path)
existing = Parser("PATH", _parse_existing)
schedule_file = Parser("PATH", _parse_schedule)
flag = Parser("FLAG", _parse_flag)
reduction = Parser("R", parse_r, complete=True)
reductions = Parser("R,R,…", _parse_r_list)
budget = Parser("SHARE", parse_flops, complete=True)
block_list = Parser("I,J,…", parse_blocks, complete=True)
size = Parser("SIZE", parse_image_size, complete=True)
table = Parser("TABLE", _parse_table)
fraction = real(0, 1)
rate = real(0, 1000)  # of learning
positive_rate = real(0, 1000, above=True)
