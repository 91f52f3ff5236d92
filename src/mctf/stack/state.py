"""The state of a forward pass between two blocks.

Axes: B images, N tokens entering the stack, M tokens at some block, C channels.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.places import Places, places_after
from ..methods.base import Step


@dataclass(frozen=True)
class State:
    """What one block hands to the next beside the tokens.

    sizes: B M, None while all are 1. places: what the tokens cover, None while nothing was fused or nobody asks.
    carry: the method's own.
    """

    sizes: Tensor | None = None
    places: Places | None = None
    carry: Any = None

    def after(self, step: Step, *, shares: bool) -> "State":
        """The state after one more block; shares: whether anybody asks for the share of each place in a token."""
        if step.assignment is None:
            return State(step.sizes, self.places, step.carry)
        weights = step.weights if shares else None
        return State(step.sizes, places_after(self.places, step.assignment, weights), step.carry)

    def spread(self, x: Tensor) -> Tensor:
        """One token per input token: B M C -> B N C."""
        return x if self.places is None else self.places.source.spread(x)
