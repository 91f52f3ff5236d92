"""The log of a run, as CSV and, where it is installed, for TensorBoard; a run that goes on repeats no line."""

import csv
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MctfError
from .consistency import Losses


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


# MERGED from mctf.train.logging:
# Sums of what a log line is the mean of, kept on the device so that no step waits for them.

_TERMS = tuple(each.name for each in fields(Losses))


class Meters:
    """Losses and gradient norm summed over steps, and the time they took."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_TERMS) + 1, device=device)
        self._present = [False] * len(_TERMS)
        self._restart()

    def _restart(self) -> None:
        self._sums.zero_()
        self._steps = 0
        self._images = 0
        self._since = time.perf_counter()

    def add(self, losses: list[Losses], gradient: Tensor, *, images: int) -> None:
        """One step of several batches; images: of all processes."""
        with torch.no_grad():
            means = [_mean(losses, name) for name in _TERMS]
            self._present = [mean is not None for mean in means]
            numbers = [gradient.new_zeros(()) if mean is None else mean.float() for mean in means]
            self._sums += torch.stack([*numbers, gradient.float()])
        self._steps += 1
        self._images += images

    def take(self, *, step: int, epoch: float, lr: float) -> Record:
        """The means since the last call; reading them waits for the device."""
        *sums, gradient = (self._sums / max(1, self._steps)).tolist()
        seconds = time.perf_counter() - self._since
        means = {name: value if there else None for name, value, there in zip(_TERMS, sums, self._present, strict=True)}
        speed = self._images / max(seconds, 1e-9)
        record = Record(step=step, epoch=epoch, lr=lr, images_per_second=speed, gradient=gradient, **means)  # type: ignore[arg-type]
        self._restart()
        return record

    def state(self) -> dict[str, Any]:
        """For a checkpoint. Time is not in it: a run that goes on counts only its own."""
        return {"sums": self._sums.cpu(), "steps": self._steps}

    def load(self, state: dict[str, Any]) -> None:
        self._sums.copy_(state["sums"])
        self._steps = state["steps"]


def _mean(losses: list[Losses], name: str) -> Tensor | None:
    values = [getattr(each, name) for each in losses]
    return None if values[0] is None else torch.stack([value.detach() for value in values]).mean()
