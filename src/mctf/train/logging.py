"""The log of a run, as CSV and for TensorBoard; a resumed run repeats no line."""

import csv
import io
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._utils import atomic_write, optional_import
from ..errors import MctfError
from .consistency import Losses


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
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder / "log.csv"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _truncate(self._path, done)
            self._file = self._path.open("a", newline="", encoding="utf-8")
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1 if done else None)
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
            if name != "step" and value is not None:
                self._board.add_scalar(f"train/{name}", value, record.step)

    def close(self) -> None:
        self._file.close()
        self._board.close()


def _truncate(path: Path, step: int) -> None:
    """Drop the lines of later steps, which will be run again, and an incomplete last line."""
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    kept = [row for row in rows if len(row) == len(header) and int(row[0]) <= step]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([header, *kept] if header else [])
    atomic_write(path, text.getvalue().encode())


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
