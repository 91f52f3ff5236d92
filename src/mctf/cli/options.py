"""Options that several verbs share, and how their values are read."""

from collections.abc import Callable
from typing import Any

import click

from ..core.schedule import ReductionSpec
from ..errors import MctfError

DTYPES = ("float32", "bfloat16", "float16")


def parse_reduction(text: str) -> ReductionSpec:
    """One r as typed: a count, a ratio below 1, or "fast"."""
    if text == "fast":
        return text
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise MctfError(f"r={text!r} is not a number: write a count (16), a ratio (0.35) or 'fast'") from None


def parse_reductions(text: str) -> list[ReductionSpec]:
    """Several r as typed, between commas."""
    return [parse_reduction(part.strip()) for part in text.split(",") if part.strip()]


def parse_numbers(text: str, option: str) -> list[int]:
    """Positive whole numbers between commas."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise MctfError(f"{option} {text!r} is not a list of positive numbers: write 1,8,64")
    return numbers


def parse_blocks(text: str | None, *, option: str = "--blocks") -> tuple[int, ...] | None:
    """Block numbers between commas; None when the option was not given."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise MctfError(f"{option} {text!r} is not a list of numbers: write 3,6,9") from None


def parse_image_size(text: str | None) -> tuple[int, int] | None:
    """An image size as typed: 384, or 384x512 as height x width."""
    if text is None:
        return None
    try:
        sides = [int(part) for part in text.lower().split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise MctfError(f"--image-size {text!r} is not a size: write 384 or 384x512 (height x width)")
    return sides[0], sides[-1]


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

method_option: Decorator = click.option(
    "--method", "-m", default="mctf", show_default=True, help="Token-reduction method."
)
blocks_option: Decorator = click.option(
    "--blocks", metavar="I,J,…", help="Blocks that fuse; the method's choice by default."
)
image_size_option: Decorator = click.option(
    "--image-size", metavar="SIZE", help="Image size, 384 or 384x512; the model's by default."
)
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
