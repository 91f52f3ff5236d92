"""The frame of a chart: from numbers to places on a drawing, and round numbers to label them with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 46


@dataclass(frozen=True)
class Axis:
    """Numbers from `low` to `high` along pixels from `start` to `end`; ticks are round numbers between."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, about: int = 5, zero: bool = False) -> "Axis":
        """One that holds all values and begins and ends at ticks. zero: let it begin at 0."""
        low, high = min(values), max(values)
        low = min(0.0, low) if zero else low
        step = round_step((high - low) / about)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        last = max(last, first + 1)
        ticks = tuple(index * step for index in range(first, last + 1))
        return cls(ticks[0], ticks[-1], start, end, ticks)

    def at(self, value: float) -> float:
        """The pixel of a number."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def label(self, tick: float) -> str:
        """A tick with as many digits as its neighbours need."""
        step = self.ticks[1] - self.ticks[0]
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        return f"{tick:.{digits}f}"


def round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, the next above what is asked; 1 where nothing is."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
