"""Sums of what a log line is the mean of, kept on the device so that no step waits for them."""

import time
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from .consistency import Losses
from .logs import Record

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
