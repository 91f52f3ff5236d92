"""Options that several commands share. The library's own parsers read r, blocks and image sizes."""

import math
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from .._utils import parse_image_size
from ..core.budget import parse_flops
from ..core.schedule import ReductionSpec, parse_blocks, parse_r
from ..errors import MctfError, did_you_mean


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


def parse_budgets(text: str) -> list[float]:
    """Several shares of the baseline's FLOPs between commas, each once."""
    budgets = list(dict.fromkeys(parse_flops(part) for part in parse_names(text)))
    if not budgets:
        raise MctfError(f"--flops {text!r} is empty: write 0.56 or 0.56,0.67,0.78")
    return budgets


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
BUDGET = Parsed("share", parse_flops)
BUDGETS = Parsed("share,…", parse_budgets)
BLOCKS = Parsed("i,j,…", parse_blocks)
IMAGE_SIZE = Parsed("size", parse_image_size)
NAMES = Parsed("name,…", parse_names)

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def amount_options(default: str | None) -> Decorator:
    """How much to fuse: -r, --flops or --schedule, then --method.

    default: the r where none of them is given, see `default_r`; None for the default of the method.
    """
    otherwise = "the method's default" if default is None else default
    options = (
        click.option(
            "-r",
            "r",
            type=REDUCTION,
            help=f"Tokens to fuse per block: 16, 0.35 or fast; {otherwise} by default.",
        ),
        flops_option,
        schedule_option,
        method_option,
    )

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def default_r(r: ReductionSpec | None, otherwise: ReductionSpec, *others: object) -> ReductionSpec | None:
    """r, or the default where neither it nor one of the others (a budget, a schedule) is given."""
    return otherwise if r is None and all(other is None for other in others) else r


flops_option: Decorator = click.option(
    "--flops", type=BUDGET, help="In place of -r: the share of the unfused model's FLOPs to keep, as 0.56."
)
budgets_option: Decorator = click.option(
    "--flops", "budgets", type=BUDGETS, help="In place of -r: shares of the unfused model's FLOPs to keep: 0.56,0.67."
)
schedule_option: Decorator = click.option(
    "--schedule",
    type=FILE,
    help="In place of -r and --method: a schedule that mctf tune wrote, or the name of one in mctf.",
)
method_option: Decorator = click.option("--method", "-m", help="Token-reduction method; mctf by default.")
options_option: Decorator = click.option(
    "--option", "pairs", multiple=True, metavar="NAME=VALUE", help="An option of the method; repeatable."
)
blocks_option: Decorator = click.option(
    "--blocks", type=BLOCKS, help="Blocks that fuse; the method's default if unset."
)
trim_last_option: Decorator = click.option(
    "--trim-last/--no-trim-last",
    default=None,
    help="Let the last block compute only what a head that reads the class token needs; the method's choice if unset.",
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
calibration_option: Decorator = click.option(
    "--calibration",
    metavar="IMAGES",
    help="Images that show the ranges of activations, as for --data; others than those that are evaluated.",
)
progress_option: Decorator = click.option(
    "--progress/--no-progress", default=None, help="Progress bar on stderr; on a terminal by default."
)
output_option: Decorator = click.option("--output", type=FILE, help="Also write the JSON object into this file.")
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def quantized_precisions(names: Sequence[str] | None, dtype: str) -> list[str]:
    """The precisions of --precision that quantize; the others must name the dtype of the model."""
    from ..deploy.metadata import SHORT_NAMES
    from ..kernels.quantized_linear import KINDS

    own = SHORT_NAMES[dtype]
    for name in names or ():
        if name in SHORT_NAMES.values() and name != own:
            wanted = next(each for each, short in SHORT_NAMES.items() if short == name)
            raise MctfError(f"--precision {name} is not the dtype of the model, {dtype}: add --dtype {wanted}")
        if name not in (own, *KINDS):
            raise MctfError(f"precision {name!r} is unknown: {did_you_mean(name, (own, *KINDS))}")
    if names is not None and not names:
        raise MctfError(f"--precision is empty: write {own},fp8")
    return [name for name in dict.fromkeys(names or ()) if name != own]


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
    return data_options(limit_option, output_option, json_option)(command)


def data_options(*last: Decorator) -> Decorator:
    """The fields of `mctf.evaluation.setup.RunOptions` except the model and the limit, then these options."""
    options: tuple[Decorator, ...] = (
        click.option("--data", required=True, help="Folder or zip files of class/name images, or hf:NAME[:SPLIT]."),
        weights_option,
        classes_option,
        image_size_option,
        crop_option,
        batch_size_option,
        click.option("--workers", type=click.IntRange(0), help="Loader processes; none on the CPU by default."),
        on_corrupt_option,
        limits_options,
        device_option,
        dtype_option,
        threads_option,
        progress_option,
        *last,
    )

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add
