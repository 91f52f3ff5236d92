"""Whether two settings evaluated on the same images differ by more than the choice of images explains.

Settings are compared image by image. The difficulty of an image is common to both and cancels in the difference, so
the paired standard error is much smaller than that of either mean.

Axes: B images.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CLEAR = 2.0  # standard errors from which on a difference counts as significant
Values = Tensor | Sequence[float]


def standard_error(values: Values) -> float | None:
    """Standard error of the mean over images, sqrt(sum_b (x_b - mean)^2 / (B - 1) / B); None for a single image."""
    images = torch.as_tensor(values, dtype=torch.float64)
    return None if len(images) < 2 else images.std().item() / math.sqrt(len(images))


@dataclass(frozen=True)
class Difference:
    """Mean of the paired differences of two settings over images. error: its standard error."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, one: Values, other: Values) -> "Difference":
        """one - other, both B and in the same order of images."""
        difference = torch.as_tensor(one, dtype=torch.float64) - torch.as_tensor(other, dtype=torch.float64)
        return cls(difference.mean().item(), standard_error(difference))

    @property
    def errors(self) -> float:
        """The signed difference in units of its standard error; 0 for a single image, which has no error."""
        if self.mean == 0 or self.error is None:
            return 0.0
        return self.mean / self.error if self.error > 0 else math.copysign(math.inf, self.mean)

    @property
    def clear(self) -> bool:
        """Whether the difference is at least two standard errors."""
        return abs(self.errors) >= _CLEAR

    def size(self, decimals: int = 4) -> str:
        """Magnitude with its error, as in "0.0006 ± 0.0009"; more decimals where the error would round to 0."""
        if self.error is None:
            return f"{abs(self.mean):.{decimals}f} ± ?"
        if self.error > 0:
            decimals = max(decimals, -math.floor(math.log10(self.error)))
        return f"{abs(self.mean):.{decimals}f} ± {self.error:.{decimals}f}"
