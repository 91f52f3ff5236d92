"""Timing of several callables side by side, and the throughput of one model while it is evaluated.

Machines drift: they warm up, throttle and share their cores. Every round therefore runs each callable once, each
round starts with another one, and speeds are compared within a round.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import TypeVar

import torch

from ..errors import MctfError

MAX_SPREAD = 0.25  # a larger relative spread means that other processes disturbed the rounds
_MIN_UPPER_BOUND = 0.97  # two runs of the same model differ by as much

T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """Seconds of one callable, one entry per round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range over the median; 0 for a single round."""
        if len(self.seconds) == 1:
            return 0.0
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median

    def speedup_over(self, other: "Timing") -> float:
        """Median over rounds of other / self, both measured in the same rounds."""
        return median(theirs / ours for ours, theirs in zip(self.seconds, other.seconds, strict=True))


def why_inconclusive(*, spread: float, upper_bound: float | None) -> str | None:
    """Why timings mean nothing, as those of a busy machine, in one sentence; None where they can be trusted.

    spread: the largest of the timings. upper_bound: the speed-up of the free-drop upper bound, which does less work
    than the baseline and nothing else, so that it cannot be slower; None where it does not apply.
    """
    if upper_bound is not None and upper_bound < _MIN_UPPER_BOUND:
        cause = f"the free-drop upper bound has {upper_bound:.2f}x the baseline's speed, though it only saves work"
    elif spread > MAX_SPREAD:
        cause = f"timings of one model differ by {spread:.0%} between rounds"
    else:
        return None
    return f"the machine is busy ({cause}): nothing can be concluded; stop other programs and measure again"


def time_interleaved(
    forwards: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    rounds: int = 7,
    warmup: int = 2,
    settle: bool = False,
    gradient: bool = False,
    after_round: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Time each callable once per round, work queued on the device included; in inference mode unless `gradient`.

    warmup: rounds that are run and not counted. settle: run each callable once, untimed, right before its timing, so
    that caches and memory are in the state it produces itself. after_round: called after every round, warm-up included.
    """
    if rounds < 1 or warmup < 0:
        raise MctfError(f"rounds={rounds} with warmup={warmup} measures nothing: use at least one round")
    names = list(forwards)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with torch.inference_mode(not gradient):
        for index in range(-warmup, rounds):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                if settle:
                    forwards[name]()
                _, elapsed = timed(forwards[name], device)
                if index >= 0:
                    seconds[name].append(elapsed)
            after_round()
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def timed(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """The result of the call and its seconds, work queued on the device included."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass
class ThroughputMeter:
    """Images and seconds of every batch of one model, collected while it runs."""

    batches: list[tuple[int, float]] = field(default_factory=list)

    def run(self, call: Callable[[], T], *, images: int, device: torch.device) -> T:
        """The result of the call, timed; the first call is preceded by an untimed one as warm-up."""
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
