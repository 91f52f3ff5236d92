"""Schedule files: how many tokens each block of a model fuses, as `mctf tune` found it, in a small JSON file.

    {"format": "mctf schedule", "version": 1, "model": …, "method": …, "options": {}, "depth": 12, "tokens": 197,
     "protected": 1, "channels": 192, "heads": 3, "r": [one amount per block], "flops": share of the baseline's,
     "kl": measured, "images": …, "seed": …, "mctf": version, "command": …}

method, depth, tokens, protected and r are what fusing needs. channels and heads are checked where a file has them. The
others tell where the schedule comes from. Schedules that come with the package are files of `data_files/schedules`,
called by their names without the suffix.
"""

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ._utils import atomic_write, read_json
from .core.schedule import Amount, plain_r
from .errors import MctfError, did_you_mean, shown
from .hosts import Architecture

FORMAT, VERSION = "mctf schedule", 1
_CURE = "give a file that mctf tune wrote"
_WIDTHS = ("channels", "heads")  # older files lack them
_FOLDER = Path(__file__).parent / "data_files" / "schedules"


class TunedElsewhereWarning(UserWarning):
    """A schedule is used on another model of the same shape."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One amount per block (r) for models of this depth and number of tokens, protected ones included.

    channels, heads: of the model's blocks, None where they are not known.
    flops: share of the baseline's FLOPs. kl: to the unfused model, mean over `images` images.
    """

    method: str
    depth: int
    tokens: int
    protected: int
    r: tuple[Amount, ...]
    channels: int | None = None
    heads: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    flops: float | None = None
    kl: float | None = None
    images: int | None = None
    seed: int | None = None
    mctf: str | None = None
    command: str | None = None

    def check_method(self, method: str | None, options: Mapping[str, object]) -> None:
        """Raise MctfError for another method or other options than the schedule's."""
        if method is not None and method != self.method:
            raise MctfError(
                f"the schedule is for method {self.method!r}, not {shown(method)}: leave out the method, "
                f"or tune one for it"
            )
        if options and dict(options) != dict(self.options):
            given = ", ".join(map(str, options))
            raise MctfError(f"a schedule includes the options of its method: leave out {shown(given)}")

    def check_model(self, architecture: Architecture) -> None:
        """Raise MctfError for a model of another shape; warn where another model has the same."""
        shape = architecture.blocks[0]
        pairs = (
            ("blocks", self.depth, len(architecture.blocks)),
            ("tokens", self.tokens, architecture.tokens),
            ("protected tokens", self.protected, architecture.protected),
            ("channels", self.channels, shape.channels),
            ("heads", self.heads, shape.heads),
        )
        for what, ours, theirs in pairs:
            if ours is not None and ours != theirs:
                made_for = f" (made for {shown(self.model)})" if self.model else ""
                raise MctfError(
                    f"the schedule is for {ours} {what}{made_for}, but {architecture.name} has {theirs}: "
                    "tune one for this model and image size"
                )
        if self._is_of_another(architecture.name):
            message = f"the schedule was tuned for {shown(self.model)}, not {architecture.name}: its KL here is unknown"
            warnings.warn(message, TunedElsewhereWarning, stacklevel=2)

    def _is_of_another(self, name: str) -> bool:
        """Whether both names are timm's, and differ in more than the tag of their weights."""
        import timm

        own = self.model.rpartition("/")[2].partition(".")[0] if isinstance(self.model, str) else ""
        return timm.is_model(own) and timm.is_model(name) and own != name

    def as_dict(self) -> dict[str, Any]:
        """The content of the file."""
        facts = asdict(self) | {"r": list(self.r)}
        first = ("model", "method", "options", "depth", "tokens", "protected", *_WIDTHS, "r")
        return {"format": FORMAT, "version": VERSION, **{name: facts[name] for name in first}, **facts}

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        atomic_write(path, (json.dumps(self.as_dict(), indent=2) + "\n").encode())


def schedules() -> tuple[str, ...]:
    """Names of the schedules that come with the package, as `mctf.fuse(model, schedule=NAME)` takes them."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def read_schedule(source: object) -> Schedule:
    """A schedule from a file, by its name in the package, or from the content of a file as a dict.

    Raises MctfError where it is none. A file comes before a name.
    """
    if isinstance(source, Schedule):
        return source
    if isinstance(source, Mapping):
        return _checked(source, "the schedule")
    if not isinstance(source, (str, os.PathLike)) or not isinstance(os.fspath(source), str):
        raise MctfError(f"schedule={shown(source)} is neither a file nor a dict: {_CURE}")
    path = find_schedule(source)
    return _checked(read_json(path, f"schedule {path}", _CURE), f"schedule {path}")


def find_schedule(source: str | os.PathLike[str]) -> Path:
    """The file of a schedule that is given by its path, or by its name in the package."""
    path = Path(source)
    if path.name != os.fspath(source) or path.suffix or os.path.exists(path):
        return path
    if path.name not in (names := schedules()):
        raise MctfError(
            f"there is no schedule {shown(path.name)}, as a file or in mctf: {did_you_mean(path.name, names)}"
        )
    return _FOLDER / f"{path.name}.json"


def _checked(facts: Mapping[Any, Any], name: str) -> Schedule:
    """The schedule of these facts; unknown ones are ignored."""
    if facts.get("format") != FORMAT:
        raise MctfError(f"{name} is no schedule, its format is {shown(facts.get('format'))}: {_CURE}")
    if type(facts.get("version")) is not int or facts["version"] != VERSION:
        raise MctfError(
            f"{name} has version {shown(facts.get('version'))}, and this mctf reads version {VERSION}: "
            "tune it again, or update mctf"
        )
    kinds: dict[str, tuple[type, ...]] = {
        "method": (str,),
        "depth": (int,),
        "tokens": (int,),
        "protected": (int,),
        "r": (list, tuple),
        "options": (dict,),
    }
    for key, kind in kinds.items():
        value = facts.get(key, {} if key == "options" else None)
        whole = type(value) is int and value >= 0
        if not isinstance(value, kind) or (int in kind and not whole):
            raise MctfError(f"{name} is damaged, its {key} is {shown(value)}: {_CURE}")
    for key in _WIDTHS:
        value = facts.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise MctfError(f"{name} is damaged, its {key} is {shown(value)}: {_CURE}")
    if not all(isinstance(option, str) for option in facts.get("options", {})):
        raise MctfError(f"{name} is damaged, its options are {shown(facts['options'])}: {_CURE}")
    try:
        r = plain_r(tuple(facts["r"]))
    except MctfError as refusal:
        raise MctfError(f"{name} is damaged: {refusal}") from None
    if not isinstance(r, tuple) or len(r) != facts["depth"]:
        raise MctfError(f"{name} is damaged, its r has {len(facts['r'])} entries for depth {facts['depth']}: {_CURE}")
    known = {each.name for each in fields(Schedule)} - {"r"}
    return Schedule(r=r, **{key: value for key, value in facts.items() if key in known})
