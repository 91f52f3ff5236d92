"""Keeping the best of the tokens, the same number in every image.

Axes: B images, N tokens, n of them unprotected, M kept, C channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .assignment import Assignment


@dataclass(frozen=True)
class Kept:
    """Which tokens stay, in their old order.

    index: B M, their places among all N. weights: B N, 1 for those that stay and 0 for the others.
    assignment: B N -> M. To have a place at all, a token that does not stay is mapped to the one before it that does,
    or to the first unprotected one, where it counts for nothing.
    """

    index: Tensor
    assignment: Assignment
    weights: Tensor

    def of(self, x: Tensor) -> Tensor:
        """The tokens that stay: B N C -> B M C."""
        return torch.take_along_dim(x, self.index[..., None], dim=1)


def keep_best(scores: Tensor, keep: int, *, protected: int) -> Kept:
    """Keep the protected tokens and, of the others, those with the `keep` largest scores (B n)."""
    batch, tokens = scores.shape[0], protected + scores.shape[1]
    best = protected + scores.topk(keep, dim=1).indices.sort(dim=1).values
    first = torch.arange(protected, device=scores.device).expand(batch, -1)
    index = torch.cat([first, best], dim=1)
    stays = torch.zeros(batch, tokens, dtype=torch.long, device=scores.device).scatter(1, index, 1)
    slots = torch.maximum(stays.cumsum(1) - 1, torch.arange(tokens, device=scores.device).clamp_max(protected))
    return Kept(index, Assignment(slots, protected + keep), stays.float())
