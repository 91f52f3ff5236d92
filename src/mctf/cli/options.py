"""Options that several verbs share, and how their values are read."""

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ..core.schedule import ReductionSpec
from ..errors import MctfError

FILE = click.Path(path_type=Path)


def parse_names(text: str) -> list[str]:
    """What stands between commas, without spaces around it and without empty places."""
    return [name.strip() for name in text.split(",") if name.strip()]


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
    return [parse_reduction(part) for part in parse_names(text)]


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


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Options of a method as typed; values that TOML understands get their type, others stay words."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise MctfError(f"--option {pair!r} is no NAME=VALUE: write --option pooling=size")
        try:
            options[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            options[name] = value
    return options


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def reduction_option(default: str) -> Decorator:
    """One r."""
    return click.option(
        "-r", "reduction", default=default, show_default=True, help="Tokens to fuse a block: 16, 0.35 or fast."
    )


method_option: Decorator = click.option(
    "--method", "-m", default="mctf", show_default=True, help="Token-reduction method."
)
options_option: Decorator = click.option(
    "--option", "pairs", multiple=True, metavar="NAME=VALUE", help="An option of the method; repeatable."
)
blocks_option: Decorator = click.option(
    "--blocks", metavar="I,J,…", help="Blocks that fuse; the method's choice by default."
)
image_size_option: Decorator = click.option(
    "--image-size", metavar="SIZE", help="Image size, 384 or 384x512; the model's by default."
)
weights_option: Decorator = click.option(
    "--weights", type=FILE, help="Weights file; timm's pretrained weights by default."
)
classes_option: Decorator = click.option("--classes", type=FILE, help="TSV of index, class folder and name.")
crop_option: Decorator = click.option(
    "--crop-pct", type=click.FloatRange(0.1, 1), help="Share of the shorter side in the crop."
)
batch_size_option: Decorator = click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True)
limit_option: Decorator = click.option(
    "--limit", type=click.IntRange(1), help="Use only so many images, evenly spaced."
)
device_option: Decorator = click.option(
    "--device", "device_name", help="As torch names it; a GPU where there is one by default."
)
dtype_option: Decorator = click.option(
    "--dtype", type=click.Choice(("float32", "bfloat16", "float16")), default="float32", show_default=True
)
threads_option: Decorator = click.option(
    "--threads", type=click.IntRange(1), help="CPU threads; torch's choice by default."
)
progress_option: Decorator = click.option(
    "--progress/--no-progress", default=None, help="Progress bar on stderr; on a terminal by default."
)
output_option: Decorator = click.option("--output", type=FILE, help="Write the JSON object into this file as well.")
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
