"""The recipe of a training run: one frozen dataclass, read from a TOML file and from the command line.

Every field has a parser, which takes text (command line) and typed values (TOML) alike. A recipe with several errors is
refused with all of them at once, before anything is loaded.
"""

import json
import reprlib
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._utils import first_line, optional_import, plural
from ..core.schedule import FAST_RATIO, ReductionSpec
from ..errors import MctfError, did_you_mean
from .parsers import (
    Parser,
    block_list,
    budget,
    choice,
    existing,
    flag,
    fraction,
    integer,
    model_name,
    optional,
    path,
    positive_rate,
    rate,
    real,
    reduction,
    reductions,
    schedule_file,
    size,
    table,
    text,
)

if TYPE_CHECKING:
    from ..data import ReadLimits
    from ..methods.base import Method
    from ..planning import FusionRequest
    from ..schedule_file import Schedule

UNFUSED = "none"  # as `method`: train the model without token fusion
OLD_NAMES = {"colour_jitter": "color_jitter"}  # still accepted in recipe files and on the command line
_MAX_EPOCHS = 1_000_000
_MAX_BYTES = 1_000_000  # of a recipe file
_MAX_PROBLEMS = 10  # that one message lists
_shown = reprlib.Repr()  # shortens the values in messages
_shown.maxstring = _shown.maxother = _shown.maxlong = 100


def option(default: Any, parser: Parser, help_text: str, *, affects_weights: bool = True) -> Any:
    """A dataclass field with its parser and help text. affects_weights: whether the trained weights depend on it."""
    metadata = {"parser": parser, "help": help_text, "affects_weights": affects_weights}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The options of `mctf finetune`; each field has its own help text."""

    model: str = option("", model_name, "A timm model.")
    weights: Path | None = option(None, optional(existing), "Weights file; timm's pretrained weights by default.")
    random_weights: bool = option(False, flag, "Start from random weights.")
    image_size: tuple[int, int] | None = option(None, optional(size), "384 or 384x512; the model's by default.")
    drop_path: float = option(0.0, fraction, "Drop-path rate of the last block; it rises linearly from 0.")

    data: str = option("", text, "Training images: folder or zip file of class/name images, or a dataset's name.")
    validation: Path | None = option(
        None, optional(existing), "Images to evaluate on at the end; none by default.", affects_weights=False
    )
    classes: Path | None = option(None, optional(existing), "TSV of index, class folder and name.")
    batch: int = option(128, integer(1), "Images per batch and process.")
    augmentation: str = option("strong", choice("none", "weak", "strong"), "Random augmentation of the images.")
    smallest_crop: float | None = option(
        None, optional(real(0, 1, above=True)), "Smallest area of a random crop; by the augmentation by default."
    )
    color_jitter: float = option(0.0, real(0, 1, below=True), "Largest change of brightness, contrast and saturation.")
    repeated: int = option(1, integer(1, 1000), "Repeated augmentation: views per image in an epoch.")
    workers: int | None = option(None, optional(integer(0)), "Processes that read images.", affects_weights=False)
    in_memory: str = option("auto", choice("auto", "yes", "no"), "Decode all images once, augment on the device.")
    on_corrupt: str = option("skip", choice("skip", "stop"), "What to do about an unreadable image.")
    max_pixels: int | None = option(None, optional(integer(1)), "Pixels of one image at most; 100 million by default.")
    max_bytes: int | None = option(None, optional(integer(1)), "Bytes of one image file at most; 256 MiB by default.")
    max_aspect: float | None = option(None, optional(real(1)), "Longer over shorter side at most; 100 by default.")

    method: str = option(
        None, optional(text), "Token-reduction method, or none for the unfused model; mctf by default."
    )
    r: ReductionSpec = option(
        None, optional(reduction), "Tokens to fuse per block: 16, 0.35 or fast; the method's published r by default."
    )
    flops: float | None = option(
        None, optional(budget), "In place of r: the share of the unfused model's FLOPs to keep, as 0.56."
    )
    schedule: Path | None = option(
        None, optional(schedule_file), "In place of r: a schedule that mctf tune wrote, or the name of one in mctf."
    )
    blocks: tuple[int, ...] | None = option(
        None, optional(block_list), "Blocks that fuse; the method's choice by default."
    )
    method_options: dict[str, Any] = option({}, table, "Options of the method.")

    objective: str = option(
        None,
        optional(choice("consistency", "cross-entropy")),
        "The loss; consistency by default, cross-entropy for methods with a loss of their own.",
    )
    consistency: float = option(1.0, real(0, 1e6), "Weight (lambda) of the MSE between class tokens.")
    confidence: float = option(0.4, fraction, "The MSE covers images whose true class has a higher probability.")
    lighter_r: int | None = option(None, optional(integer(0)), "r' is drawn from 0 to this; from 0 to r by default.")
    smoothing: float = option(0.1, fraction, "Label smoothing.")
    teacher: str | None = option(None, optional(text), "A model to distill from.")
    teacher_weights: Path | None = option(None, optional(existing), "Its weights; pretrained ones by default.")
    teaching: float = option(0.5, fraction, "Weight of the distillation loss; the labels have the rest.")
    temperature: float = option(2.0, positive_rate, "Temperature of the distillation.")

    epochs: int = option(30, integer(1, _MAX_EPOCHS), "Epochs of the cosine schedule, warm-up included.")
    warmup_epochs: int = option(0, integer(0, _MAX_EPOCHS), "Epochs of linear learning-rate warm-up.")
    cooldown_epochs: int = option(0, integer(0, _MAX_EPOCHS), "Epochs at the lowest learning rate after the cosine.")
    lr: float = option(3e-5, positive_rate, "Peak learning rate.")
    layers_lr: float = option(1e-3, positive_rate, "Peak learning rate of the layers of a learned method.")
    min_lr: float = option(1e-6, rate, "Lowest learning rate.")
    warmup_lr: float = option(1e-6, rate, "Learning rate at the start of the warm-up.")
    weight_decay: float = option(0.05, rate, "Weight decay of AdamW.")
    layer_decay: float | None = option(None, optional(real(0, 1, above=True)), "Layer-wise learning-rate decay.")
    clip: float | None = option(None, optional(real(0, above=True)), "Clip the gradient to this norm.")
    accumulate: int = option(1, integer(1), "Gradient accumulation: batches per optimizer step.")
    ema: float | None = option(
        None, optional(real(0, 1, below=True)), "Decay of the moving average of the weights, as 0.9998."
    )
    seed: int = option(0, integer(0, 2**63 - 1), "Seed of all randomness.")

    dtype: str = option("float32", choice("float32", "bfloat16"), "bfloat16: mixed precision by autocast.")
    compile: bool = option(False, flag, "Compile the blocks with torch.compile.")
    channels_last: bool = option(False, flag, "Channels-last layout of images and convolutions.")
    device: str | None = option(
        None, optional(text), "As torch names it; a GPU where there is one.", affects_weights=False
    )
    threads: int | None = option(
        None, optional(integer(1)), "CPU threads; torch's choice by default.", affects_weights=False
    )

    output: Path = option(
        Path("mctf-finetune"), path, "Folder for checkpoints, logs and weights.", affects_weights=False
    )
    save_steps: int | None = option(None, optional(integer(1)), "Steps between checkpoints.", affects_weights=False)
    save_epochs: int = option(1, integer(1), "Epochs between checkpoints.", affects_weights=False)
    keep: int = option(2, integer(2), "Checkpoints to keep.", affects_weights=False)
    log_steps: int = option(50, integer(1), "Steps averaged in one line of the log.", affects_weights=False)
    evaluate_r: tuple[Any, ...] = option(
        None,
        optional(reductions),
        "r of the evaluation at the end; by the method by default.",
        affects_weights=False,
    )

    def __post_init__(self) -> None:
        """Parse every value and fill in what depends on the method; raises MctfError with all that is wrong."""
        _refuse(list(self._parse_fields()))
        problems: list[str] = []
        method: Method | None = None
        try:
            self._read_schedule()
            method = self.make_method()
        except MctfError as error:
            problems.append(str(error))
        own_r: ReductionSpec = 16 if method is None else method.default_r
        by_r = self.flops is None and self.schedule is None
        r = own_r if self.r is None and by_r else self.r
        has_loss = hasattr(method, "extra_loss")
        by_count = isinstance(own_r, int) and not (method is not None and method.adaptive)
        for name, value in (
            ("r", r),
            ("objective", "cross-entropy" if has_loss else "consistency"),
            ("evaluate_r", None if not by_r else (0, 4, 8, 12, 16, 20) if by_count else tuple(dict.fromkeys((0, r)))),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _refuse([*problems, *self._contradictions(method)])

    def _read_schedule(self) -> None:
        """Take method and options from the schedule; without one the method is mctf by default."""
        schedule = self.read_schedule()
        if schedule is not None:
            schedule.check_method(self.method, self.method_options)
            object.__setattr__(self, "method_options", dict(schedule.options))
        if self.method is None:
            object.__setattr__(self, "method", "mctf" if schedule is None else schedule.method)

    def read_schedule(self) -> "Schedule | None":
        """The content of the schedule's file; None without one."""
        from ..schedule_file import read_schedule

        return None if self.schedule is None else read_schedule(self.schedule)

    def request(self) -> "FusionRequest":
        """How the model is to be fused; raises MctfError where values contradict each other."""
        from ..planning import FusionRequest

        return FusionRequest.of(
            self.method,
            r=self.r,
            flops=self.flops,
            blocks=self.blocks,
            schedule=self.schedule,
            options=self.method_options,
        )

    def _parse_fields(self) -> Iterator[str]:
        """Replace every value by the parsed one; yields what is wrong."""
        for each in fields(self):
            value, parser = getattr(self, each.name), each.metadata["parser"]
            if value == "" and each.default == "":
                given = each.name.replace("_", "-")
                yield f"{each.name} is missing: pass --{given}, or write {each.name} = … into the file of --config"
                continue
            try:
                object.__setattr__(self, each.name, parser.parse(value))
                _plain(getattr(self, each.name))
            except MctfError as error:
                yield str(error) if parser.complete else f"{each.name} = {_shown.repr(value)}: {error}"

    def _contradictions(self, method: "Method | None") -> Iterator[str]:
        """Cross-field validation."""
        if self.random_weights and self.weights is not None:
            yield "weights and random_weights exclude each other: give one of them"
        if self.teacher is None and self.teacher_weights is not None:
            yield "teacher_weights without a teacher: name its model with teacher"
        if self.smallest_crop is not None and self.augmentation == "none":
            yield "smallest_crop needs random crops: choose augmentation = weak or strong"
        if self.color_jitter and self.augmentation == "none":
            yield "color_jitter is part of the random augmentation: choose augmentation = weak or strong"
        if self.warmup_epochs >= self.epochs and self.warmup_epochs:
            yield f"warmup_epochs = {self.warmup_epochs} takes all of epochs = {self.epochs}: shorten the warm-up"
        if not self.layers_lr / self.lr < sys.float_info.max:
            yield f"lr = {self.lr:g} is too far below layers_lr = {self.layers_lr:g}: raise it"
        if self.min_lr > self.lr:
            yield f"min_lr = {self.min_lr:g} is above lr = {self.lr:g}: lower it"
        try:
            schedule = self.read_schedule()
            if self.fuses:
                self.request()
            elif self.flops is not None or schedule is not None:
                yield "flops and schedule belong to a method that fuses: name one, as mctf"
        except MctfError as error:
            schedule = None
            if method is not None:
                yield str(error)
        r = self.r if schedule is None else schedule.r
        if r is None:  # a budget: by what follows, one that fuses something
            r = 0 if self.flops == 1 else FAST_RATIO
        amounts = r if isinstance(r, tuple) else (FAST_RATIO if r == "fast" else r,)
        if self.objective == "consistency" and (not self.fuses or not any(amounts)):
            yield "consistency compares two amounts of fusion: give r above 0, or objective = cross-entropy"
        if self.lighter_r is not None and not all(isinstance(amount, int) for amount in amounts):
            given = f"flops = {self.flops}" if self.r is None else f"r = {self.r}"
            yield f"lighter_r is a number of tokens, but {given} is not: omit it"
        elif self.lighter_r is not None and self.lighter_r > max(amounts):
            yield f"lighter_r = {self.lighter_r} is above r = {self.r}: choose from 0 to r"
        if self.objective == "consistency" and method is not None and method.masks_in_training:
            yield f"{self.method} has a loss of its own, for one amount of fusion: omit objective"
        if isinstance(self.r, tuple) and self.blocks:
            yield "r has one amount per block: omit blocks, with 0 in r where nothing fuses"
        if not self.fuses and (self.method_options or self.blocks):
            yield "method_options and blocks belong to a method that fuses: name one, as mctf"

    def make_method(self) -> "Method | None":
        """The method with its options, None for the unfused model; raises MctfError where there is no such method."""
        if not self.fuses:
            return None
        from ..methods import make_method

        return make_method(self.method, self.method_options)

    @property
    def limits(self) -> "ReadLimits":
        """What one image may cost."""
        from ..data import ReadLimits

        return ReadLimits.of(max_bytes=self.max_bytes, max_pixels=self.max_pixels, max_aspect=self.max_aspect)

    @property
    def total_epochs(self) -> int:
        return self.epochs + self.cooldown_epochs

    @property
    def fuses(self) -> bool:
        return self.method != UNFUSED

    def fingerprint(self) -> dict[str, Any]:
        """All values that the trained weights depend on, as JSON: runs with equal fingerprints are the same run."""
        chosen = [each.name for each in fields(self) if each.metadata["affects_weights"]]
        values = {name: _plain(getattr(self, name)) for name in chosen}
        schedule = self.read_schedule()
        if schedule is not None:  # the content counts, not the name of its file
            values |= {"schedule": None, "r": list(schedule.r)}
        return json.loads(json.dumps(values))

    def as_toml(self) -> str:
        """The recipe as a file that `read_toml` reads; options without a value are omitted."""
        tomli_w = optional_import("tomli_w", extra="train", purpose="recipe files")
        values = {each.name: _plain(getattr(self, each.name)) for each in fields(self)}
        return tomli_w.dumps({name: value for name, value in values.items() if value is not None and value != {}})


def read_recipe(values: Mapping[str, Any]) -> Recipe:
    """A recipe from values by name; raises MctfError with all that is wrong, unknown names included."""
    values = {OLD_NAMES.get(name, name): value for name, value in values.items()}
    names = [each.name for each in fields(Recipe)]
    problems = [
        f"there is no option {name if len(name) < 50 else _shown.repr(name)}: {_closest(name, names)}"
        for name in values
        if name not in names
    ]
    try:
        recipe = Recipe(**{name: value for name, value in values.items() if name in names})
    except MctfError as error:
        problems.append(str(error))
    except RecursionError:
        problems.append("its tables are nested too deeply")
    _refuse(problems)
    return recipe


def _closest(word: str, names: list[str]) -> str:
    """The closest name for an error message; there are too many to list."""
    suggestion = did_you_mean(word[:50], names)
    return suggestion if suggestion.startswith("did you mean") else "mctf finetune --help lists all options"


def read_toml(path: Path) -> dict[str, Any]:
    """The values in a TOML file; hyphens in names count as underscores."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device may never end
            kind = "folder" if path.is_dir() else "pipe or device"
            raise MctfError(f"{path} is a {kind}: give a TOML file of options")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise MctfError(f"{path} is no recipe, it has more than {_MAX_BYTES:,} bytes: give a TOML file of options")
        values = tomllib.loads(content.decode("utf-8-sig"))
    except OSError as error:
        raise MctfError(f"{path} cannot be read ({error.strerror}): give a TOML file of options") from None
    except RecursionError:
        raise MctfError(f"{path} is nested too deeply: write lines as batch = 128") from None
    except MctfError:
        raise
    except ValueError as error:  # of TOML or UTF-8, a number of too many digits, a path with a null character
        raise MctfError(f"{path} is not a TOML file ({first_line(error):.100}): write lines as batch = 128") from None
    named: dict[str, Any] = {}
    for written, value in values.items():
        name = written.replace("-", "_")
        name = OLD_NAMES.get(name, name)
        if name in named:
            raise MctfError(f"{path} gives {name} twice: keep one of the lines")
        named[name] = value
    return named


def _refuse(problems: list[str]) -> None:
    if len(problems) > _MAX_PROBLEMS:
        problems = [*problems[:_MAX_PROBLEMS], f"and {plural(len(problems) - _MAX_PROBLEMS, 'more problem')}"]
    if problems:
        raise MctfError("; ".join(problems))


def _plain(value: Any) -> Any:
    """A value as TOML and JSON have it; raises MctfError for text that no file in UTF-8 can hold."""
    if isinstance(value, dict):
        return {_plain(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise MctfError("expected text in UTF-8, as recipe.toml is: rename it") from None
        if "\0" in value:
            raise MctfError("expected text without null characters")
    return value
