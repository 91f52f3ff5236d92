"""Checkpoints of a run: written atomically, verified by a checksum, the previous one kept beside the last.

A checkpoint is written under a temporary name, flushed to the disk and then renamed. Its name carries the step and a
checksum of the content, so that a damaged file is detected without a second file beside it.
"""

import hashlib
import io
import math
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from .._utils import atomic_file, first_line, plural
from ..errors import MctfError
from .config import Recipe
from .logging import Meters
from .optimizer import Steps

_NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")
_PARTIAL = re.compile(r"step-\d{8,}(\.\d+)?\.partial")
# of a parameter group: what changes between steps, and what depends on the device
_FREE_OPTIONS = {"lr", "fused", "foreach", "capturable", "differentiable"}


@dataclass(frozen=True)
class RunState:
    """Collects the state of a run for a checkpoint, and restores it.

    `mctf eval --weights` reads the weights in a checkpoint, averaged ones first. world_size: number of
    processes, which determines the images of each. inputs: checksums of the images and files it depends on, by name.
    """

    recipe: Recipe
    steps: Steps
    world_size: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: ModelEmaV3 | None
    meters: Meters
    inputs: Mapping[str, str]

    def state_dict(self, step: int) -> dict[str, Any]:
        state = {
            "step": step,
            "recipe": self.recipe.fingerprint(),
            "world_size": self.world_size,
            "steps_per_epoch": self.steps.per_epoch,
            "inputs": dict(self.inputs),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "meters": self.meters.state_dict(),
        }
        if self.ema is not None:
            state["model_ema"] = self.ema.module.state_dict()
        return state

    def load_state_dict(self, state: Any) -> tuple[int, tuple[str, ...]]:
        """Restore the run; its step, and notes. Raises MctfError, nothing changed, for another run or content."""
        differences = self._differences(state)
        if differences:
            raise MctfError(
                f"the checkpoint belongs to another run ({'; '.join(differences)}): "
                "resume with the options of that run, or start in another folder"
            )
        damage = self._damage(state)
        if damage:
            raise MctfError(f"the checkpoint cannot be resumed from ({damage}): remove it, or start in another folder")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.meters.load_state_dict(state["meters"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["model_ema"])
        absent = [name for name in self.inputs if name not in state.get("inputs", {})]
        notes = (f"the checkpoint has no checksum of the {' and '.join(absent)}: they are not compared",)
        return state["step"], notes if absent else ()

    def _differences(self, state: Any) -> list[str]:
        required = {"recipe": dict, "world_size": int, "steps_per_epoch": int, "optimizer": dict}
        if not isinstance(state, dict) or any(not isinstance(state.get(name), kind) for name, kind in required.items()):
            return ["it was not written by this version of mctf finetune"]
        theirs, ours = state["recipe"], self.recipe.fingerprint()
        differences = [
            f"{name} = {theirs.get(name)!r:.100} there, {ours[name]!r:.100} here"
            for name in ours
            if theirs.get(name) != ours[name]
        ]
        if state["world_size"] != self.world_size:
            processes = plural(state["world_size"], "process", "processes")
            differences.append(f"{processes} there, {self.world_size} here")
        if state["steps_per_epoch"] != self.steps.per_epoch:
            differences.append(
                f"{plural(state['steps_per_epoch'], 'step')} per epoch there, {self.steps.per_epoch} here"
            )
        inputs = state.get("inputs", {})
        for name, digest in self.inputs.items():
            if isinstance(inputs, dict) and inputs.get(name, digest) != digest:
                differences.append(f"the {name} are others: checksum {inputs[name]!s:.8} there, {digest:.8} here")
        return differences

    def _damage(self, state: dict[str, Any]) -> str | None:
        """What a checkpoint lacks for this run; None where it is complete."""
        step = state.get("step")
        if not isinstance(step, int) or not 0 <= step <= self.steps.total:
            return f"step {step!r:.20} is not from 0 to {self.steps.total}"
        if not isinstance(state.get("inputs", {}), dict):
            return "its checksums are none"
        weights = _compare_tensors(state.get("model"), self.model.state_dict(), "model")
        if weights is None and self.ema is not None:
            weights = _compare_tensors(state.get("model_ema"), self.ema.module.state_dict(), "model_ema")
        meters = state.get("meters")
        if not isinstance(meters, dict) or not isinstance(meters.get("steps"), int):
            return weights or "meters are missing"
        own = self.meters.state_dict()
        sums = _compare_tensors({"sums": meters.get("sums")}, {"sums": own["sums"]}, "meters")
        return weights or sums or self._optimizer_damage(state["optimizer"])

    def _optimizer_damage(self, state: dict[str, Any]) -> str | None:
        groups, slots = state.get("param_groups"), state.get("state")
        own = self.optimizer.state_dict()["param_groups"]
        if not isinstance(groups, list) or not isinstance(slots, dict) or len(groups) != len(own):
            return "the optimizer's state is of another model"
        for theirs, ours in zip(groups, own, strict=True):
            if not isinstance(theirs, dict) or theirs.get("params") != ours["params"]:
                return "the optimizer's state is of another model"
            common = theirs.keys() & ours.keys() - _FREE_OPTIONS
            lr = theirs.get("lr")
            if any(theirs[name] != ours[name] for name in common) or not isinstance(lr, float) or not math.isfinite(lr):
                return "the optimizer has other options"
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        numbers = [number for group in own for number in group["params"]]
        shapes = {number: parameter.shape for number, parameter in zip(numbers, parameters, strict=True)}
        for number, slot in slots.items():
            moments = [slot.get(name) for name in ("exp_avg", "exp_avg_sq")] if isinstance(slot, dict) else [None]
            fits = all(isinstance(each, Tensor) and each.shape == shapes.get(number) for each in moments)
            if not fits or not isinstance(slot.get("step"), Tensor) or slot["step"].numel() != 1:
                return f"the optimizer's state of parameter {number!r:.20} does not fit"
        return None


def _compare_tensors(theirs: Any, ours: Mapping[str, Tensor], name: str) -> str | None:
    """The first difference in names, shapes or dtypes of two state_dicts; None where they agree."""
    if not isinstance(theirs, dict):
        return f"{name} is missing"
    for key in {**ours, **theirs}:
        value = theirs.get(key)
        if key not in ours or not isinstance(value, Tensor):
            return f"{name} has {'no' if key in ours else 'an unknown'} tensor {key!r:.80}"
        if value.shape != ours[key].shape or value.dtype != ours[key].dtype or value.layout != ours[key].layout:
            shapes = f"{tuple(value.shape)} {value.dtype} there, {tuple(ours[key].shape)} {ours[key].dtype} here"
            return f"{key!r:.80} of {name} is {shapes}"
    return None


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in one folder, of which the last `keep` are kept. Only rank 0 writes them."""

    folder: Path
    keep: int = 2

    def paths(self) -> list[Path]:
        """From the newest to the oldest."""
        if not self.folder.is_dir():
            return []
        files = (path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and path.is_file())
        return sorted(files, key=step_of, reverse=True)

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint; raises MctfError, the earlier ones untouched, where the disk refuses."""
        name, digest = f"step-{step:08d}", _digest()

        def path() -> Path:
            return self.folder / f"{name}-{digest.hexdigest()}.pt"

        hashed: _HashedFile | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(self.folder / f"{name}.{os.getpid()}.partial", path, sync=True) as file:
                hashed = _HashedFile(file, digest)
                torch.save(state, hashed)  # type: ignore[arg-type]
        except (OSError, RuntimeError) as failure:
            # torch reports a failed write as a RuntimeError of its own
            cause = failure if hashed is None else hashed.failure or failure
            reason = getattr(cause, "strerror", None) or first_line(cause)
            intact = next((path for path in self.paths() if is_intact(path)), None)
            earlier = "there is no earlier one" if intact is None else f"that of step {step_of(intact)} is intact"
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
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        return False
    return digest.hexdigest() == match[2]


def read_checkpoint(path: Path) -> Any:
    """The content of a checkpoint, on the CPU; nothing in it is executed. Raises MctfError for other content."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # what other content raises has no common class
        raise MctfError(f"{path} is not a checkpoint of mctf finetune: remove it, or start in another folder") from None


def _digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=8)


class _HashedFile(io.RawIOBase):
    """A file opened for writing that updates a digest with its content. failure: of the last write that failed."""

    def __init__(self, file: IO[bytes], digest: hashlib.blake2b) -> None:
        self._file = file
        self._digest = digest
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        self._digest.update(data)
        try:
            return self._file.write(data)
        except OSError as failure:
            self.failure = failure
            raise

    def writable(self) -> bool:
        return True
