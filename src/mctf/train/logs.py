"""The log of a run, as CSV and, where it is installed, for TensorBoard; a run that goes on repeats no line."""

import csv
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import MctfError


@dataclass(frozen=True)
class Record:
    """The means over the last steps; what `Losses` names is what it says. None where a term has no part.

    step: optimiser steps done; epoch: as a fraction. gradient: its norm before clipping. lr: of the last step.
    """

    step: int
    epoch: float
    lr: float
    images_per_second: float
    total: float
    answers: float
    lighter: float | None
    distance: float | None
    confident: float | None
    teaching: float | None
    extra: float | None
    gradient: float


class Logs:
    """Writes `log.csv` and TensorBoard's events into a folder, beginning after step `done`."""

    def __init__(self, folder: Path, *, done: int = 0) -> None:
        self._path = folder / "log.csv"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _cut_after(self._path, done)
            self._file = self._path.open("a", newline="", encoding="utf-8")
            self._board = _board(folder / "tensorboard", done)
        except OSError as failure:
            raise MctfError(f"{folder} cannot be written to ({failure.strerror}): choose another --output") from None
        self._lines = csv.writer(self._file)
        if self._file.tell() == 0:
            self._lines.writerow(each.name for each in fields(Record))

    def write(self, record: Record) -> None:
        try:
            self._lines.writerow(asdict(record).values())
            self._file.flush()
        except OSError as failure:
            raise MctfError(f"{self._path} cannot be written ({failure.strerror}): make room, then --resume") from None
        for name, value in asdict(record).items():
            if self._board is not None and name != "step" and value is not None:
                self._board.add_scalar(f"train/{name}", value, record.step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _board(folder: Path, done: int) -> Any:
    """TensorBoard's writer, which forgets what an earlier run wrote of later steps; None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=done + 1 if done else None)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a `log.csv`, numbers as numbers, nothing as None."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(value) if value else None for name, value in row.items()} for row in rows]


def _cut_after(path: Path, step: int) -> None:
    """Drop the lines of later steps, which are about to be done again, and a last line cut short."""
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        heading, *rows = list(csv.reader(file)) or [[]]
    kept = [row for row in rows if len(row) == len(heading) and int(row[0]) <= step]
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([heading, *kept] if heading else [])
    os.replace(temporary, path)
