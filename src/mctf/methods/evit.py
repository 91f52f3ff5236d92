"""EViT: keep the tokens the class token attends to, and fuse the rest to one.

Liang et al., "Not All Patches are What You Need: Expediting Vision Transformers via Token Reorganizations", ICLR 2022.
After attention and its residual, a_j is the class token's attention to token j, averaged over heads. Of n unprotected
tokens the ceil(kappa n) with the largest a stay, ordered by a; the others become sum_j a_j x_j, which is not divided
by sum_j a_j, at the end. That token is one of the n in the next such block.

Choices where the paper is silent: distillation and register tokens stay in place like the class token; a_j has no
gradient; with a single inattentive token nothing would be saved, and the block runs as it is.

Axes: B images, N tokens, M after the block, C channels.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..core.assignment import Assignment
from ..core.criteria import TINY
from ..core.matching import rank_descending
from .attentive import Attentive
from .base import Step, Turn, check_switches


@dataclass(frozen=True)
class EViT(Attentive):
    """r = 0.3, the default, is the keep rate 0.7.

    fuse_inattentive: make one token of those that leave; otherwise they are dropped. To have a place at all, a
        dropped token is mapped to the least attentive one that stays, where it counts for nothing.
    """

    fuse_inattentive: bool = True

    name: ClassVar[str] = "evit"
    summary: ClassVar[str] = "EViT (ICLR 2022): keeps what the class token attends to, fuses the rest to one token"

    def __post_init__(self) -> None:
        check_switches(fuse_inattentive=self.fuse_inattentive)

    @property
    def added(self) -> int:
        return int(self.fuse_inattentive)

    def reduce(self, x: Tensor, a: Tensor, sizes: Tensor | None, turn: Turn) -> Step:
        left = x.shape[1] - turn.r
        place = _places_by_rank(a, turn.protected)
        # the last place is that of the fused token, or of the least attentive one that stays
        assignment = Assignment(place.clamp_max(left - 1), left)
        if not self.fuse_inattentive:
            kept = place.argsort(dim=1)[:, :left, None].expand(-1, -1, x.shape[2])
            return Step(x.gather(1, kept), None, assignment, (place < left).float())
        weights = a.clamp_min(TINY)
        mass = weights.where(place >= left - 1, 0).sum(dim=1)
        x, sizes = kernels.fuse_tokens(x, weights, sizes, assignment, by_size=False)
        fused = (x[:, -1] * mass[:, None]).to(x.dtype)  # pooling divides by the mass
        return Step(torch.cat([x[:, :-1], fused[:, None]], dim=1), sizes, assignment, weights)


def _places_by_rank(a: Tensor, protected: int) -> Tensor:
    """Place of each token when the unprotected ones are sorted by falling a: B N."""
    first = torch.arange(protected, device=a.device).expand(a.shape[0], -1)
    return torch.cat([first, protected + rank_descending(a[:, protected:])], dim=1)
