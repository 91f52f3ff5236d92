"""How fast several ways to do the same work are, measured side by side.

Machines drift: they warm up, throttle and share their cores. So every round runs each way once, each round begins
with another one, and speeds are compared within a round.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import TypeVar

import torch

from ..errors import MctfError

STEADY = 0.25  # a wider middle half means that rounds were disturbed
DISTURBED = "the rounds differ too much to trust this: something else keeps the machine busy"


@dataclass(frozen=True)
class Timing:
    """Seconds of one way to do the work, one entry a round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Width of the middle half of the rounds, as a share of the median; one round has none."""
        if len(self.seconds) == 1:
            return 0.0
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median

    def speedup_over(self, other: "Timing") -> float:
        """How many times as fast as the other this is: the median over rounds of their ratio."""
        return median(theirs / ours for ours, theirs in zip(self.seconds, other.seconds, strict=True))


def measure(
    forwards: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    rounds: int = 7,
    warmup: int = 2,
    settle: bool = False,
    gradient: bool = False,
    after_round: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Time each of the callables, interleaved, work queued on the device included; without gradient unless asked.

    warmup: rounds that are run and not counted. settle: run each callable once, untimed, right before its timing, so
    that it finds caches and memory as it leaves them itself. after_round: called after every round, warm-up included.
    """
    if rounds < 1 or warmup < 0:
        raise MctfError(f"rounds={rounds} with warmup={warmup} measures nothing: take at least one round")
    names = list(forwards)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with torch.inference_mode(not gradient):
        for index in range(-warmup, rounds):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                if settle:
                    forwards[name]()
                _, taken = timed(forwards[name], device)
                if index >= 0:
                    seconds[name].append(taken)
            after_round()
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


# MERGED from mctf.evaluation.timing:
# How fast a model runs: every forward pass timed on its own, its first one left out.

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
