"""Checkpoints that are whole or not there, known by their checksum, the one before kept beside the last.

A checkpoint is written under a temporary name, flushed to the disk and then renamed. Its name carries the step and a
checksum of the content, so that nothing beside it can go missing or belong to another file.
"""

import hashlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from ..errors import MctfError
from .config import Recipe
from .logging import Meters
from .optimizer import Steps

_NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in one folder, of which the last `keep` are kept. One process alone writes them."""

    folder: Path
    keep: int = 2

    def paths(self) -> list[Path]:
        """From the newest to the oldest."""
        if not self.folder.is_dir():
            return []
        return sorted((path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)), key=step_of, reverse=True)

    def save(self, step: int, payload: dict[str, Any]) -> Path:
        """Write a checkpoint; raises MctfError, the earlier ones untouched, where the disk refuses."""
        partial = self.folder / f"step-{step:08d}{_PARTIAL}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with written(partial) as file:
                torch.save(payload, file)
            path = self.folder / f"step-{step:08d}-{file.checksum()}.pt"
            os.replace(partial, path)
            _flush_folder(self.folder)
        except (OSError, RuntimeError) as failure:  # torch reports a failed write as a RuntimeError of its own
            raise MctfError(self._lost(step, failure)) from None
        finally:
            _remove(partial)
        self._tidy(path)
        return path

    def _lost(self, step: int, failure: Exception) -> str:
        reason = getattr(failure, "strerror", None) or str(failure).splitlines()[0]
        whole = next((path for path in self.paths() if is_whole(path)), None)
        earlier = "there is no earlier one" if whole is None else f"that of step {step_of(whole)} is intact"
        return f"the checkpoint of step {step} cannot be written ({reason}), {earlier}: make room, then --resume"

    def _tidy(self, last: Path) -> None:
        """Remove what is older than the last `keep`, leftovers, and steps of a past that was begun again."""
        overtaken = [path for path in self.paths() if path != last and step_of(path) >= step_of(last)]
        kept = [path for path in self.paths() if path not in overtaken]
        for path in (*overtaken, *kept[self.keep :], *self.folder.glob(f"*{_PARTIAL}")):
            path.unlink(missing_ok=True)

    def newest(self) -> tuple[Path | None, tuple[str, ...]]:
        """The newest whole checkpoint, and in words which damaged ones lie before it."""
        damaged: list[str] = []
        for path in self.paths():
            if is_whole(path):
                return path, tuple(damaged)
            damaged.append(f"{path} is damaged, its content does not have the checksum of its name")
        if damaged:
            raise MctfError(f"no checkpoint in {self.folder} is whole: start again in another folder, without --resume")
        return None, ()


def step_of(path: Path) -> int:
    matched = _NAME.fullmatch(path.name)
    if matched is None:
        raise MctfError(f"{path.name} is not the name of a checkpoint: expected step-NUMBER-CHECKSUM.pt")
    return int(matched[1])


def is_whole(path: Path) -> bool:
    """Whether a file has the checksum that its name says."""
    matched = _NAME.fullmatch(path.name)
    if matched is None:
        return False
    digest = _digest()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == matched[2]


def read(path: Path) -> dict[str, Any]:
    """What a whole checkpoint holds, on the CPU; nothing in it is executed."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=8)


class Summed(io.RawIOBase):
    """A file opened for writing that sums up what passes through."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sum = _digest()

    def write(self, data: Any) -> int:
        self._sum.update(data)
        return self._file.write(data)

    def writable(self) -> bool:
        return True

    def checksum(self) -> str:
        return self._sum.hexdigest()


@contextmanager
def written(path: Path) -> Iterator[Any]:
    """A file whose content is on the disk when the block ends."""
    with path.open("wb") as file:
        summed = Summed(file)
        yield summed
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is whole or not there; raises MctfError where the disk refuses."""
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written(partial) as file:
            file.write(content)
        os.replace(partial, path)
    except OSError as failure:
        raise MctfError(f"{path} cannot be written ({failure.strerror}): choose another --output") from None
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _flush_folder(folder: Path) -> None:
    """Make a rename in this folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# MERGED from mctf.train.checkpoint:
# What a checkpoint of a run holds, and whether it belongs to this run.


@dataclass(frozen=True)
class Snapshots:
    """Takes the state of a run, and puts it back. `mctf eval --weights` reads the weights in it, averaged ones first.

    world: how many processes there are; they decide which process sees which images.
    """

    recipe: Recipe
    steps: Steps
    world: int
    model: nn.Module
    optimiser: torch.optim.Optimizer
    average: ModelEmaV3 | None
    meters: Meters

    def take(self, step: int) -> dict[str, Any]:
        payload = {
            "step": step,
            "recipe": self.recipe.decisive(),
            "world": self.world,
            "steps_per_epoch": self.steps.per_epoch,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "meters": self.meters.state(),
        }
        if self.average is not None:
            payload["model_ema"] = self.average.module.state_dict()
        return payload

    def put_back(self, payload: dict[str, Any]) -> int:
        """The step it was taken after; raises MctfError, nothing changed, where it is of another run."""
        differences = list(self._differences(payload))
        if differences:
            raise MctfError(
                f"the checkpoint is of another run ({'; '.join(differences)}): "
                "resume with the options it was made with, or start in another folder"
            )
        self.model.load_state_dict(payload["model"])
        self.optimiser.load_state_dict(payload["optimiser"])
        self.meters.load(payload["meters"])
        if self.average is not None:
            self.average.module.load_state_dict(payload["model_ema"])
        return payload["step"]

    def _differences(self, payload: dict[str, Any]) -> list[str]:
        theirs, ours = payload.get("recipe"), self.recipe.decisive()
        if theirs is None:
            return ["it was not made by mctf finetune"]
        names = [name for name in ours if theirs.get(name) != ours[name]]
        found = [f"{name} = {theirs.get(name)!r} there, {ours[name]!r} here" for name in names]
        for name, here in (("world", self.world), ("steps_per_epoch", self.steps.per_epoch)):
            if payload[name] != here:
                words = {"world": "processes", "steps_per_epoch": "steps an epoch"}[name]
                found.append(f"{payload[name]} {words} there, {here} here")
        return found
