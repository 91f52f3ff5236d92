"""What a checkpoint of a run holds, and whether it belongs to this run."""

from dataclasses import dataclass
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from ..errors import MctfError
from .meters import Meters
from .optimiser import Steps
from .recipe import Recipe


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
