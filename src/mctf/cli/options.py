"""Options that several commands share. The library's own parsers read r, blocks and image sizes."""

import math
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from .._utils import parse_image_size
from ..core.schedule import ReductionSpec, parse_blocks, parse_r
from ..errors import MctfError


class FileName(click.Path):
    """The type of an option that names a file or a folder; an empty name, as of an unset variable, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value) == "":
            self.fail("the name is empty", param, ctx)
        return super().convert(value, param, ctx)


FILE = FileName(path_type=Path)


class FiniteRange(click.FloatRange):
    """A range that refuses nan, which compares with nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number


class Parsed(click.ParamType):
    """The type of an option whose text is read by a function that raises MctfError."""

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name = name
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.parse(value)


def parse_names(text: str) -> list[str]:
    """The parts between commas, without surrounding spaces and without empty ones."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_reductions(text: str) -> list[ReductionSpec]:
    """Several r between commas."""
    reductions = [parse_r(part) for part in parse_names(text)]
    if not reductions:
        raise MctfError(f"-r {text!r} is empty: name at least one r (-r 16)")
    return reductions


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Options of a method as typed; values that are valid TOML get its type, others stay text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise MctfError(f"--option {pair!r} is no NAME=VALUE: write --option pooling=size")
        try:
            options[name] = tomllib.loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):  # no TOML, a number of too many digits, deep nesting
            options[name] = value
    return options


REDUCTION = Parsed("r", parse_r)
REDUCTIONS = Parsed("r,…", parse_reductions)
BLOCKS = Parsed("i,j,…", parse_blocks)
IMAGE_SIZE = Parsed("size", parse_image_size)
NAMES = Parsed("name,…", parse_names)

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def reduction_option(default: str | None) -> Decorator:
    """One r; None for the default of the method."""
    help_text = "Tokens to fuse per block: 16, 0.35 or fast."
    if default is None:
        help_text = "Tokens to fuse per block: 16, 0.35 or fast; the method's default otherwise."
    return click.option("-r", "r", type=REDUCTION, default=default, show_default=default is not None, help=help_text)


method_option: Decorator = click.option(
    "--method", "-m", default="mctf", show_default=True, help="Token-reduction method."
)
options_option: Decorator = click.option(
    "--option", "pairs", multiple=True, metavar="NAME=VALUE", help="An option of the method; repeatable."
)
blocks_option: Decorator = click.option(
    "--blocks", type=BLOCKS, help="Blocks that fuse; the method's default if unset."
)
image_size_option: Decorator = click.option(
    "--image-size", type=IMAGE_SIZE, help="384 or 384x512 (height x width); the model's own by default."
)
weights_option: Decorator = click.option(
    "--weights", type=FILE, help="Weights file; timm's pretrained weights by default."
)
classes_option: Decorator = click.option("--classes", type=FILE, help="TSV of index, class folder and name.")
crop_option: Decorator = click.option(
    "--crop-pct", type=FiniteRange(0.1, 1), help="Share of the shorter side in the crop."
)
batch_size_option: Decorator = click.option(
    "--batch-size", type=click.IntRange(1, 10**9), metavar="INTEGER", default=32, show_default=True
)
limit_option: Decorator = click.option(
    "--limit", type=click.IntRange(1), help="Use only this many images, evenly spaced."
)
device_option: Decorator = click.option(
    "--device", "device_name", help="A torch device; the GPU by default, if there is one."
)
dtype_option: Decorator = click.option(
    "--dtype", type=click.Choice(("float32", "bfloat16", "float16")), default="float32", show_default=True
)
threads_option: Decorator = click.option(
    "--threads", type=click.IntRange(1), help="CPU threads; the default of torch if unset."
)
progress_option: Decorator = click.option(
    "--progress/--no-progress", default=None, help="Progress bar on stderr; on a terminal by default."
)
output_option: Decorator = click.option("--output", type=FILE, help="Also write the JSON object into this file.")
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def limits_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The fields of `mctf.data.ReadLimits`."""
    options = (
        click.option(
            "--max-pixels", type=click.IntRange(1), help="Pixels of one image at most; 100 million by default."
        ),
        click.option(
            "--max-bytes", type=click.IntRange(1), help="Bytes of one image file at most; 256 MiB by default."
        ),
        click.option(
            "--max-aspect", type=click.FloatRange(1), help="Longer over shorter side at most; 100 by default."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


on_corrupt_option: Decorator = click.option(
    "--on-corrupt",
    type=click.Choice(("stop", "skip")),
    default="stop",
    show_default=True,
    help="What to do about an unreadable image.",
)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The fields of `mctf.evaluation.setup.RunOptions` except the model, then --output and --json."""
    options = (
        click.option("--data", required=True, help="Folder or zip files of class/name images, or hf:NAME[:SPLIT]."),
        weights_option,
        classes_option,
        image_size_option,
        crop_option,
        batch_size_option,
        limit_option,
        click.option("--workers", type=click.IntRange(0), help="Loader processes; none on the CPU by default."),
        on_corrupt_option,
        limits_options,
        device_option,
        dtype_option,
        threads_option,
        progress_option,
        output_option,
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command
