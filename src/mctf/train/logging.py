"""The log of a run, as CSV and for TensorBoard; a resumed run repeats no line."""

import csv
import io
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._utils import atomic_write, optional_import
from ..errors import MctfError
from .consistency import Losses

LOG_FILE = "log.csv"


@dataclass(frozen=True)
class Record:
    """One line of the log: means over the last steps, with the names of `Losses`; None for terms that are not used.

    step: optimizer steps done; epoch: as a fraction. lr: of the last step. grad_norm: before clipping.
    """

    step: int
    epoch: float
    lr: float
    images_per_second: float
    total: float
    cross_entropy: float
    lighter_cross_entropy: float | None
    distance: float | None
    confident: float | None
    distillation: float | None
    extra: float | None
    grad_norm: float


def check_tensorboard() -> None:
    """Raise MctfError where TensorBoard is not installed."""
    optional_import("tensorboard", extra="train", purpose="training logs")


class Logs:
    """Writes `log.csv` and TensorBoard's events into a folder, from step `done` + 1 on."""

    def __init__(self, folder: Path, *, done: int = 0) -> None:
        check_tensorboard()
        self._path = folder / LOG_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _truncate(self._path, done)
            self._file = self._path.open("a", newline="", encoding="utf-8")
            self._events = _Events(folder / "tensorboard", resumed_after=done)
        except OSError as failure:
            raise MctfError(f"{folder} cannot be written to ({failure.strerror}): choose another --output") from None
        self._lines = csv.writer(self._file)
        if self._file.tell() == 0:
            self._lines.writerow(_COLUMNS)

    def write(self, record: Record) -> None:
        path: Path = self._path
        try:
            self._lines.writerow(asdict(record).values())
            self._file.flush()
            path = self._events.path
            self._events.write(record)
        except OSError as failure:
            raise MctfError(f"{path} cannot be written ({failure.strerror}): make room, then --resume") from None

    def close(self) -> None:
        for file in (self._file, self._events):
            with suppress(OSError):  # a failed write was reported before
                file.close()


class _Events:
    """TensorBoard's events, written at once: the thread of its own writer reports a full disk by a traceback."""

    def __init__(self, folder: Path, *, resumed_after: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)  # TensorBoard reads files in the order of their names
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{nanoseconds:09d}"
        self.path = folder / name
        self._file = self.path.open("wb")
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        if resumed_after:  # TensorBoard drops the events from this step on, which are written again
            self._add(step=resumed_after + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, record: Record) -> None:
        values = {name: value for name, value in asdict(record).items() if name != "step" and value is not None}
        scalars = [self._summary.Value(tag=f"train/{name}", simple_value=value) for name, value in values.items()]
        self._add(step=record.step, summary=self._summary(value=scalars))
        self._file.flush()

    def _add(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())

    def close(self) -> None:
        self._file.close()


def logged_steps(path: Path) -> int:
    """The last step in a log, 0 where there is none; raises MctfError for a file that is not a log of finetune."""
    return max((int(row[0]) for row in _read(path)), default=0)


def _read(path: Path) -> list[list[str]]:
    """The complete lines of a log, without its heading."""
    if not os.path.lexists(path):
        return []
    refusal = MctfError(f"{path} is not a log of this version of mctf finetune: move it, or name another --output")
    if not path.is_file():
        raise refusal
    try:
        with path.open(newline="", encoding="utf-8") as file:
            complete, newline, _ = file.read().rpartition("\n")
        header, *rows = list(csv.reader(io.StringIO(complete + newline, newline=""))) or [_COLUMNS]
        rows = [row for row in rows if len(row) == len(_COLUMNS) and int(row[0]) >= 0]
    except (ValueError, csv.Error):
        raise refusal from None
    except OSError as failure:
        raise MctfError(f"{path} cannot be read ({failure.strerror}): name another --output") from None
    if header != _COLUMNS:
        raise refusal
    return rows


def _truncate(path: Path, step: int) -> None:
    """Drop the lines of later steps, which will be run again, and an incomplete last line."""
    if not path.exists():
        return
    kept = [row for row in _read(path) if int(row[0]) <= step]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([_COLUMNS, *kept])
    atomic_write(path, text.getvalue().encode())


_COLUMNS = [each.name for each in fields(Record)]
_TERMS = tuple(each.name for each in fields(Losses))


class Meters:
    """Losses and gradient norm summed over steps on the device, without synchronization, and the elapsed time."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_TERMS) + 1, device=device)
        self._used = [False] * len(_TERMS)
        self._reset()

    def _reset(self) -> None:
        self._sums.zero_()
        self._steps = 0
        self._images = 0
        self._start = time.perf_counter()

    def add(self, losses: list[Losses], grad_norm: Tensor, *, images: int) -> None:
        """One step of one or more batches; images: of all processes."""
        with torch.no_grad():
            means = [_mean(losses, name) for name in _TERMS]
            self._used = [mean is not None for mean in means]
            values = [grad_norm.new_zeros(()) if mean is None else mean.float() for mean in means]
            self._sums += torch.stack([*values, grad_norm.float()])
        self._steps += 1
        self._images += images

    def take(self, *, step: int, epoch: float, lr: float) -> Record:
        """The means since the last call; waits for the device."""
        *sums, grad_norm = (self._sums / max(1, self._steps)).tolist()
        seconds = time.perf_counter() - self._start
        means = {name: value if used else None for name, value, used in zip(_TERMS, sums, self._used, strict=True)}
        speed = self._images / max(seconds, 1e-9)
        record = Record(step=step, epoch=epoch, lr=lr, images_per_second=speed, grad_norm=grad_norm, **means)  # type: ignore[arg-type]
        self._reset()
        return record

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint. It holds no time: a resumed run measures its own."""
        return {"sums": self._sums.cpu(), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums.copy_(state["sums"])
        self._steps = state["steps"]


def _mean(losses: list[Losses], name: str) -> Tensor | None:
    values = [getattr(each, name) for each in losses]
    return None if values[0] is None else torch.stack([value.detach() for value in values]).mean()
