"""How fast a model runs: every forward pass timed on its own, its first one left out."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import torch

Result = TypeVar("Result")


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """What the call gives and the seconds it took, work queued on the device included."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass
class Pace:
    """Times of the batches of one model, collected while it runs."""

    batches: list[tuple[int, float]] = field(default_factory=list)

    def run(self, call: Callable[[], Result], *, images: int, device: torch.device) -> Result:
        """Make the call and note its time; before the first time it is made once more to warm up."""
        if not self.batches:
            call()
        result, seconds = timed(call, device)
        self.batches.append((images, seconds))
        return result

    @property
    def images_per_second(self) -> float:
        """From the median over batches of full size: a smaller last batch runs at another speed."""
        full = max(images for images, _ in self.batches)
        return full / median(seconds for images, seconds in self.batches if images == full)
