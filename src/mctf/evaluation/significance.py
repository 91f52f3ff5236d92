"""Whether two settings that saw the same images differ by more than the choice of images explains.

Settings are compared image by image. What makes an image hard is common to both and drops out of their difference,
so its standard error is much smaller than that of either mean.

Axes: B images.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CLEAR = 2.0  # standard errors from which on a difference is told from noise
Values = Tensor | Sequence[float]


def standard_error(values: Values) -> float | None:
    """Of the mean over images: sqrt(sum_b (x_b - mean)^2 / (B - 1) / B); None for a single image."""
    images = torch.as_tensor(values, dtype=torch.float64)
    return None if len(images) < 2 else images.std().item() / math.sqrt(len(images))


@dataclass(frozen=True)
class Difference:
    """How much more one setting has than another in the mean over images. error: its paired standard error."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, one: Values, other: Values) -> "Difference":
        """one - other, both B and in the same order of images."""
        apart = torch.as_tensor(one, dtype=torch.float64) - torch.as_tensor(other, dtype=torch.float64)
        return cls(apart.mean().item(), standard_error(apart))

    @property
    def errors(self) -> float:
        """The difference in standard errors, with its sign; 0 where a single image leaves the error unknown."""
        if self.mean == 0 or self.error is None:
            return 0.0
        return self.mean / self.error if self.error > 0 else math.copysign(math.inf, self.mean)

    @property
    def clear(self) -> bool:
        """Whether it is at least two standard errors."""
        return abs(self.errors) >= _CLEAR

    def size(self, decimals: int = 4) -> str:
        """As in "0.0006 ± 0.0009", without a sign; with more decimals where the error would vanish otherwise."""
        if self.error is None:
            return f"{abs(self.mean):.{decimals}f} ± ?"
        if self.error > 0:
            decimals = max(decimals, -math.floor(math.log10(self.error)))
        return f"{abs(self.mean):.{decimals}f} ± {self.error:.{decimals}f}"
