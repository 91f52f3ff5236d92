"""Fields of a recipe: how a value is read, from a command line (words) and from a TOML file (typed) alike."""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.schedule import ReductionSpec, make_schedule
from ..errors import MctfError, did_you_mean

if TYPE_CHECKING:
    from ..methods.base import Method


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


# MERGED from mctf.train.config:
# Everything that a run of training is told: one frozen dataclass, read from TOML and from the command line.
#
# A recipe that is wrong in several places says so of all of them at once.

PLAIN = "none"  # the method of a model that fuses nothing
_share = real(0, 1)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The options of `mctf finetune`; each field holds its own help text."""

    model: str = option("", text, "A timm model.")
    weights: Path | None = option(None, optional(existing), "Weights file; timm's pretrained weights by default.")
    random_weights: bool = option(False, switch, "Start from random weights.")
    image_size: tuple[int, int] | None = option(None, optional(image_size), "384 or 384x512; the model's by default.")
    drop_path: float = option(0.0, _share, "Rate of stochastic depth in the last block; it rises from 0.")

    data: str = option("", text, "Training images: folder or zip file of class/name images, or a dataset's name.")
    validation: Path | None = option(
        None, optional(existing), "Images to evaluate on at the end; none by default.", decides=False
    )
    classes: Path | None = option(None, optional(existing), "TSV of index, class folder and name.")
    batch: int = option(128, whole(1), "Images a batch, in each process.")
    augmentation: str = option("strong", word("none", "weak", "strong"), "Random changes of the images.")
    smallest_crop: float | None = option(
        None, optional(real(0, 1, above=True)), "Least share of the area a crop keeps; by the augmentation by default."
    )
    colour_jitter: float = option(0.0, _share, "Most change of brightness, contrast and saturation.")
    repeated: int = option(1, whole(1), "How often an epoch shows each of its images, augmented anew.")
    workers: int | None = option(None, optional(whole(0)), "Processes that read images.", decides=False)
    in_memory: str = option("auto", word("auto", "yes", "no"), "Decode all images once, augment on the device.")
    on_corrupt: str = option("skip", word("skip", "stop"), "What to do about an unreadable image.")

    method: str = option("mctf", text, "Token-reduction method, or none for a plain model.")
    r: ReductionSpec = option(
        None, optional(reduction), "Tokens to fuse a block: 16, 0.35 or fast; as the method's authors do by default."
    )
    blocks: tuple[int, ...] | None = option(None, optional(blocks), "Blocks that fuse; the method's choice by default.")
    method_options: dict[str, Any] = option({}, table, "Options of the method.")

    objective: str = option(
        None,
        optional(word("consistency", "cross-entropy")),
        "What is minimised; consistency by default, cross-entropy for methods with a loss of their own.",
    )
    consistency: float = option(1.0, real(0), "Weight (lambda) of the distance between class tokens.")
    confidence: float = option(0.4, _share, "The distance counts images whose true class is more probable than this.")
    lighter_r: int | None = option(None, optional(whole(0)), "r' is drawn from 0 to this; to r by default.")
    smoothing: float = option(0.1, _share, "Label smoothing.")
    teacher: str | None = option(None, optional(text), "A timm model to learn from.")
    teacher_weights: Path | None = option(None, optional(existing), "Its weights; pretrained ones by default.")
    teaching: float = option(0.5, _share, "The teacher's share of the loss; labels have the rest.")
    temperature: float = option(2.0, real(0, above=True), "Softens the answers of teacher and student.")

    epochs: int = option(30, whole(1), "Epochs of the cosine, warm-up included.")
    warmup_epochs: int = option(0, whole(0), "Epochs in which the learning rate rises.")
    cooldown_epochs: int = option(0, whole(0), "Epochs at the lowest learning rate after the cosine.")
    lr: float = option(3e-5, real(0, above=True), "Highest learning rate.")
    layers_lr: float = option(1e-3, real(0, above=True), "Highest learning rate of the layers of a learned method.")
    min_lr: float = option(1e-6, real(0), "Lowest learning rate.")
    warmup_lr: float = option(1e-6, real(0), "Learning rate at the start of the warm-up.")
    weight_decay: float = option(0.05, real(0), "Weight decay of AdamW.")
    layer_decay: float | None = option(None, optional(real(0, 1, above=True)), "Learning rate of a layer by the next.")
    clip: float | None = option(None, optional(real(0, above=True)), "Largest norm of the gradient.")
    accumulate: int = option(1, whole(1), "Batches whose gradients make one step.")
    ema: float | None = option(None, optional(_share), "Decay of the average of the weights, as 0.9998.")
    seed: int = option(0, whole(0), "Decides everything random.")

    dtype: str = option("float32", word("float32", "bfloat16"), "bfloat16: mixed precision by autocast.")
    compile: bool = option(False, switch, "Compile the blocks with torch.compile.")
    channels_last: bool = option(False, switch, "Channels-last layout of images and convolutions.")
    device: str | None = option(None, optional(text), "As torch names it; a GPU where there is one.", decides=False)
    threads: int | None = option(None, optional(whole(1)), "CPU threads; torch's choice by default.", decides=False)

    output: Path = option(Path("mctf-finetune"), place, "Folder for checkpoints, logs and weights.", decides=False)
    save_steps: int | None = option(None, optional(whole(1)), "Steps between checkpoints.", decides=False)
    save_epochs: int = option(1, whole(1), "Epochs between checkpoints.", decides=False)
    keep: int = option(2, whole(2), "Checkpoints to keep: the last, and some before it.", decides=False)
    log_steps: int = option(50, whole(1), "Steps that one line of the log is the mean of.", decides=False)
    evaluate_r: tuple[Any, ...] = option(
        None, optional(reductions), "r of the evaluation at the end; around the method's own by default.", decides=False
    )

    def __post_init__(self) -> None:
        """Read every value; raises MctfError with all that is wrong."""
        problems = []
        for each in fields(self):
            value = getattr(self, each.name)
            try:
                object.__setattr__(self, each.name, each.metadata["read"](value))
            except (MctfError, TypeError) as wrong:
                problems.append(_say(each.name, value, wrong))
        _refuse(problems)
        self._fill_in()
        _refuse(list(self._contradictions()))

    def made_method(self) -> "Method | None":
        """The method with its options; None for a plain model, and where there is no such method."""
        if not self.fuses:
            return None
        from ..methods import make_method

        try:
            return make_method(self.method, self.method_options)
        except MctfError:
            return None

    def _fill_in(self) -> None:
        """Give what was left open the value that suits the method."""
        method = self.made_method()
        own_r: ReductionSpec = 16 if method is None else method.default_r
        r = own_r if self.r is None else self.r
        objective = "cross-entropy" if hasattr(method, "extra_loss") else "consistency"
        counts = isinstance(own_r, int) and not (method is not None and method.adaptive)
        evaluate_r = (0, 4, 8, 12, 16, 20) if counts else tuple(dict.fromkeys((0, r)))
        for name, value in (("r", r), ("objective", objective), ("evaluate_r", evaluate_r)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def all_epochs(self) -> int:
        return self.epochs + self.cooldown_epochs

    @property
    def fuses(self) -> bool:
        return self.method != PLAIN

    def decisive(self) -> dict[str, Any]:
        """All that has a part in the trained weights, as JSON has it: runs that agree in it are the same run."""
        return json.loads(
            json.dumps(
                {each.name: _plain(getattr(self, each.name)) for each in fields(self) if each.metadata["decides"]}
            )
        )

    def as_toml(self) -> str:
        """The recipe as a file that `read_toml` reads; what has no value is left out."""
        values = {each.name: _plain(getattr(self, each.name)) for each in fields(self)}
        options = values.pop("method_options")
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]
        if options:
            lines += ["", "[method_options]", *(f"{name} = {json.dumps(value)}" for name, value in options.items())]
        return "\n".join(lines) + "\n"

    def _contradictions(self) -> Iterator[str]:
        """What no single value is to blame for."""
        if self.random_weights and self.weights is not None:
            yield "weights and random_weights exclude each other: give one of them"
        if self.teacher is None and self.teacher_weights is not None:
            yield "teacher_weights without a teacher: name its model with teacher"
        if self.warmup_epochs >= self.epochs and self.warmup_epochs:
            yield f"warmup_epochs = {self.warmup_epochs} leaves nothing of epochs = {self.epochs}: shorten the warm-up"
        if self.min_lr > self.lr:
            yield f"min_lr = {self.min_lr:g} is above lr = {self.lr:g}: lower it"
        yield from self._fusion_problems()

    def _fusion_problems(self) -> Iterator[str]:
        if self.objective == "consistency" and (not self.fuses or not any(_entries(self.r))):
            yield "consistency compares two amounts of fusing: give r above 0, or objective = cross-entropy"
        if self.lighter_r is not None and not all(isinstance(entry, int) for entry in _entries(self.r)):
            yield f"lighter_r counts tokens, but r = {self.r} is no count: leave it out"
        elif self.lighter_r is not None and self.lighter_r > max(_entries(self.r)):
            yield f"lighter_r = {self.lighter_r} is above r = {self.r}: choose from 0 to r"
        method = self.made_method()
        if self.objective == "consistency" and method is not None and method.masks_in_training:
            yield f"{self.method} has a loss of its own, for one amount of fusing: leave out objective"
        if not self.fuses and (self.method_options or self.blocks):
            yield "method_options and blocks belong to a method that fuses: name one, as mctf"
        if self.fuses:
            from ..methods import make_method

            try:
                make_method(self.method, self.method_options)
            except MctfError as wrong:
                yield str(wrong)


def read_recipe(values: Mapping[str, Any]) -> Recipe:
    """A recipe from values by name; raises MctfError with all that is wrong, unknown names included."""
    known = [each.name for each in fields(Recipe)]
    unknown = [f"there is no option {name}: {did_you_mean(name, known)}" for name in values if name not in known]
    try:
        recipe = Recipe(**{name: value for name, value in values.items() if name in known})
    except MctfError as wrong:
        unknown.append(str(wrong))
    _refuse(unknown)
    return recipe


def read_toml(path: Path) -> dict[str, Any]:
    """The values in a TOML file; hyphens in names count as underscores."""
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except OSError as failure:
        raise MctfError(f"{path} cannot be read ({failure.strerror}): give a TOML file of options") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise MctfError(f"{path} is no TOML file ({failure}): write lines as batch = 128") from None
    return {name.replace("-", "_"): value for name, value in values.items()}


def _refuse(problems: list[str]) -> None:
    if problems:
        raise MctfError("; ".join(problems))


def _say(name: str, value: Any, wrong: Exception) -> str:
    if value == "":
        return f"{name} is missing: pass --{name}, or write {name} = … into the file of --config"
    return f"{name} = {value!r}: {wrong}"


def _entries(r: Any) -> tuple[Any, ...]:
    """All numbers in r; the preset "fast" is a ratio."""
    return r if isinstance(r, tuple) else (0.35 if r == "fast" else r,)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
