"""What experiments found, kept on disk one file an experiment, so that a run that was stopped goes on where it was.

A record also says under what conditions it was made: a folder never mixes records of several models or images.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._utils import atomic_write
from ..errors import MctfError

if TYPE_CHECKING:
    from .runner import Experiment, Result

Conditions = Mapping[str, Any]
_FOLDER = "results"


@dataclass(frozen=True)
class Record:
    """One finished experiment. conditions: empty where no model and no images were needed. date: when it ended.

    form: of the result, as `Experiment` has it; files that do not say have the first.
    """

    experiment: str
    conditions: dict[str, Any]
    seconds: float
    date: str
    result: "Result"
    form: int = 1


@dataclass(frozen=True)
class Records:
    """The records in one folder. conditions: of this run; without a model and images those of the folder."""

    folder: Path
    conditions: Conditions

    @classmethod
    def at(cls, folder: Path, conditions: Conditions | None, experiments: Sequence["Experiment"]) -> "Records":
        """conditions: None for a run without a model, which goes with whatever the folder holds."""
        if conditions is not None:
            return cls(folder, conditions)
        found = [cls(folder, {}).find(each) for each in experiments if each.needs_images]
        latest = max((record for record in found if record is not None), key=lambda record: record.date, default=None)
        return cls(folder, {} if latest is None else latest.conditions)

    def of(self, experiment: "Experiment") -> Conditions:
        """The conditions that matter to an experiment."""
        return self.conditions if experiment.needs_images else {}

    def find(self, experiment: "Experiment") -> Record | None:
        """What was found before; raises MctfError where it cannot be read."""
        path = self._path(experiment)
        if not path.is_file():
            return None
        try:
            return Record(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise MctfError(f"{path} is no result of an experiment: remove it") from None

    def fitting(self, experiment: "Experiment") -> Record | None:
        """What was found before under the same conditions, kept in the form that is read here."""
        record = self.find(experiment)
        fits = record is not None and record.conditions == dict(self.of(experiment)) and record.form == experiment.form
        return record if fits else None

    def check(self, experiments: Sequence["Experiment"]) -> None:
        """Raise MctfError where one of these was done under other conditions, or kept in another form."""
        for experiment in experiments:
            record = self.find(experiment)
            if record is not None and self.fitting(experiment) is None:
                raise MctfError(
                    f"{self.folder} holds results {self._difference(record, experiment)}: "
                    "choose another folder, or measure anew with --again"
                )

    def keep(self, record: Record, experiment: "Experiment") -> None:
        path = self._path(experiment)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, (json.dumps(asdict(record), indent=1) + "\n").encode())

    def _difference(self, record: Record, experiment: "Experiment") -> str:
        """Why it does not fit: the form, or the first condition that differs, in words."""
        if record.form != experiment.form:
            return f"of another version of mctf ({experiment.name} lacks what this one reads)"
        names = {**record.conditions, **self.conditions}
        name = next(name for name in names if record.conditions.get(name) != self.conditions.get(name))
        return f"for {name} {record.conditions.get(name)!r}, not {self.conditions.get(name)!r}"

    def _path(self, experiment: "Experiment") -> Path:
        return self.folder / _FOLDER / f"{experiment.name}.json"
