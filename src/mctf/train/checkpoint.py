"""Checkpoints of a run: written atomically, verified by a checksum, the previous one kept beside the last.

A checkpoint is written under a temporary name, flushed to the disk and then renamed. Its name carries the step and a
checksum of the content, so that a damaged file is detected without a second file beside it.
"""

import hashlib
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from .._utils import atomic_file, first_line, plural
from ..errors import MctfError
from .config import Recipe
from .logging import Meters
from .optimizer import Steps

_NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")
_PARTIAL = re.compile(r"step-\d{8,}(\.\d+)?\.partial")


@dataclass(frozen=True)
class RunState:
    """Collects the state of a run for a checkpoint, and restores it.

    `mctf eval --weights` reads the weights in a checkpoint, averaged ones first. world_size: number of
    processes, which determines the images of each.
    """

    recipe: Recipe
    steps: Steps
    world_size: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: ModelEmaV3 | None
    meters: Meters

    def state_dict(self, step: int) -> dict[str, Any]:
        state = {
            "step": step,
            "recipe": self.recipe.fingerprint(),
            "world_size": self.world_size,
            "steps_per_epoch": self.steps.per_epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "meters": self.meters.state_dict(),
        }
        if self.ema is not None:
            state["model_ema"] = self.ema.module.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Restore the run and return its step; raises MctfError, nothing changed, for a checkpoint of another run."""
        differences = self._differences(state)
        if differences:
            raise MctfError(
                f"the checkpoint belongs to another run ({'; '.join(differences)}): "
                "resume with the options of that run, or start in another folder"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.meters.load_state_dict(state["meters"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["model_ema"])
        return state["step"]

    def _differences(self, state: dict[str, Any]) -> list[str]:
        if not {"recipe", "world_size", "steps_per_epoch", "optimizer"} <= state.keys():
            return ["it was not written by this version of mctf finetune"]
        theirs, ours = state["recipe"], self.recipe.fingerprint()
        differences = [
            f"{name} = {theirs.get(name)!r} there, {ours[name]!r} here"
            for name in ours
            if theirs.get(name) != ours[name]
        ]
        if state["world_size"] != self.world_size:
            processes = plural(state["world_size"], "process", "processes")
            differences.append(f"{processes} there, {self.world_size} here")
        if state["steps_per_epoch"] != self.steps.per_epoch:
            differences.append(f"{state['steps_per_epoch']} steps per epoch there, {self.steps.per_epoch} here")
        return differences


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in one folder, of which the last `keep` are kept. Only rank 0 writes them."""

    folder: Path
    keep: int = 2

    def paths(self) -> list[Path]:
        """From the newest to the oldest."""
        if not self.folder.is_dir():
            return []
        return sorted((path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)), key=step_of, reverse=True)

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint; raises MctfError, the earlier ones untouched, where the disk refuses."""
        name, digest = f"step-{step:08d}", _digest()

        def path() -> Path:
            return self.folder / f"{name}-{digest.hexdigest()}.pt"

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(self.folder / f"{name}.{os.getpid()}.partial", path, sync=True) as file:
                torch.save(state, _HashedFile(file, digest))  # type: ignore[arg-type]
        except (OSError, RuntimeError) as failure:  # torch reports a failed write as a RuntimeError of its own
            intact = next((path for path in self.paths() if is_intact(path)), None)
            earlier = "there is no earlier one" if intact is None else f"that of step {step_of(intact)} is intact"
            reason = getattr(failure, "strerror", None) or first_line(failure)
            raise MctfError(
                f"the checkpoint of step {step} cannot be written ({reason}), {earlier}: make room, then --resume"
            ) from None
        self._prune(path())
        return path()

    def _prune(self, last: Path) -> None:
        """Remove all but the last `keep`, partial files, and later steps of a run that was restarted before them."""
        later = [path for path in self.paths() if path != last and step_of(path) >= step_of(last)]
        kept = [path for path in self.paths() if path not in later]
        partial = [path for path in self.folder.iterdir() if _PARTIAL.fullmatch(path.name)]
        for path in (*later, *kept[self.keep :], *partial):
            path.unlink(missing_ok=True)

    def newest(self) -> tuple[Path | None, tuple[str, ...]]:
        """The newest intact checkpoint, and one warning per damaged one after it."""
        damaged: list[str] = []
        for path in self.paths():
            if is_intact(path):
                return path, tuple(damaged)
            damaged.append(f"{path} is damaged: its content does not match the checksum in its name")
        if damaged:
            raise MctfError(
                f"no checkpoint in {self.folder} is intact: start again in another folder, without --resume"
            )
        return None, ()


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise MctfError(f"{path.name} is not the name of a checkpoint: expected step-NUMBER-CHECKSUM.pt")
    return int(match[1])


def is_intact(path: Path) -> bool:
    """Whether the content of a file has the checksum in its name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return False
    digest = _digest()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == match[2]


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU; nothing in it is executed."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=8)


class _HashedFile(io.RawIOBase):
    """A file opened for writing that updates a digest with its content."""

    def __init__(self, file: IO[bytes], digest: hashlib.blake2b) -> None:
        self._file = file
        self._digest = digest

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return self._file.write(data)

    def writable(self) -> bool:
        return True
