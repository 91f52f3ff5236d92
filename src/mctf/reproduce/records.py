"""Results of experiments on disk, one JSON file per experiment, so that an interrupted run resumes.

A record also holds the conditions of its run: a folder never mixes results of several models or data sets.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Self, get_args, get_origin, get_type_hints

from .._utils import atomic_write
from ..errors import MctfError

if TYPE_CHECKING:
    from .runner import Experiment

Conditions = Mapping[str, Any]
_FOLDER = "results"


class Result:
    """Base of the result types of experiments.

    Implementations are frozen dataclasses whose fields are JSON values, tuples, dictionaries by text and other such
    dataclasses.
    """

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The inverse of `to_json`: keys that are not fields are ignored, fields with a default may be missing."""
        return _decode(cls, value)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise MctfError(f"{folder} cannot be created ({failure.strerror}): name another --out") from None


def _decode(kind: Any, value: Any) -> Any:
    """A JSON value as the type of a field: lists become tuples, objects become dataclasses."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(
            **{each.name: _decode(hints[each.name], value[each.name]) for each in fields(kind) if each.name in value}
        )  # type: ignore[operator]
    arguments = get_args(kind)
    if NoneType in arguments:
        return None if value is None else _decode(next(each for each in arguments if each is not NoneType), value)
    if get_origin(kind) is dict:
        return {key: _decode(arguments[1], each) for key, each in value.items()}
    if get_origin(kind) is tuple:
        return tuple(_decode(arguments[0], each) for each in value)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Record:
    """One finished experiment. conditions: empty where neither model nor images matter. date: when it ended.

    form: the version of the result's layout, see `Experiment`; files without one have form 1.
    """

    experiment: str
    conditions: dict[str, Any]
    seconds: float
    date: str
    result: Result
    form: int = 1

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "result": self.result.to_json()}


@dataclass(frozen=True)
class Records:
    """The records of one folder. conditions: those of this run; without a model, those of the folder."""

    folder: Path
    conditions: Conditions

    @classmethod
    def at(cls, folder: Path, conditions: Conditions | None, experiments: Sequence["Experiment"]) -> "Records":
        """conditions: None for a run without a model, which takes over the conditions of the latest record."""
        results = folder / _FOLDER
        if os.path.lexists(results) and not results.is_dir():
            raise MctfError(f"{results} is not a folder: name another --out")
        if conditions is not None:
            return cls(folder, conditions)
        files = [cls(folder, {})._read(each) for each in experiments if each.needs_images]
        latest = max((file for file in files if file is not None), key=lambda file: file["date"], default=None)
        return cls(folder, {} if latest is None else latest["conditions"])

    def of(self, experiment: "Experiment") -> Conditions:
        """The conditions that an experiment depends on."""
        return self.conditions if experiment.needs_images else {}

    def load(self, experiment: "Experiment") -> Record | None:
        """The record of the same conditions and form; None where there is none, MctfError where it is unreadable."""
        file = self._read(experiment)
        if file is None or self._difference(file, experiment) is not None:
            return None
        try:
            return Record(**{**file, "result": experiment.result_type.from_json(file["result"])})
        except (KeyError, TypeError, AttributeError):
            raise self._unreadable(experiment) from None

    def check(self, experiments: Sequence["Experiment"]) -> None:
        """Raise MctfError where a record has other conditions or another form."""
        for experiment in experiments:
            file = self._read(experiment)
            difference = None if file is None else self._difference(file, experiment)
            if difference is not None:
                raise MctfError(
                    f"{self.folder} holds results {difference}: choose another folder, or measure anew with --again"
                )

    def save(self, record: Record, experiment: "Experiment") -> None:
        path = self._path(experiment)
        make_folder(path.parent)
        atomic_write(path, (json.dumps(record.to_json(), indent=1) + "\n").encode())

    def _read(self, experiment: "Experiment") -> dict[str, Any] | None:
        """The JSON object of a record, with its form; the result is not decoded."""
        path = self._path(experiment)
        if not path.is_file():
            return None
        try:
            file = {"form": 1, **json.loads(path.read_text(encoding="utf-8"))}
        except (OSError, ValueError, TypeError, RecursionError):
            raise self._unreadable(experiment) from None
        if set(file) != {each.name for each in fields(Record)}:
            raise self._unreadable(experiment)
        return file

    def _difference(self, file: dict[str, Any], experiment: "Experiment") -> str | None:
        """The form or the first condition that differs from this run, in words; None where all agree."""
        if file["form"] != experiment.form:
            return f"of another version of mctf ({experiment.name} lacks what this version reads)"
        before, own = file["conditions"], self.of(experiment)
        for name in {**before, **own}:
            if name.endswith("_checksum") and name not in before:  # the record is older than checksums
                continue
            if before.get(name) != own.get(name):
                return f"for {name} {before.get(name)!r}, not {own.get(name)!r}"
        return None

    def _unreadable(self, experiment: "Experiment") -> MctfError:
        return MctfError(f"{self._path(experiment)} is not the result of an experiment: remove it")

    def _path(self, experiment: "Experiment") -> Path:
        return self.folder / _FOLDER / f"{experiment.name}.json"
