"""Keeping the best of the tokens, the same number in every image.

Axes: B images, N tokens, n of them unprotected, M kept, C channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .assignment import Assignment


@dataclass(frozen=True)
class TopK:
    """Which tokens stay, in their old order.

    index: B M, their places among all N. weights: B N, 1 for those that stay and 0 for the others.
    assignment: B N -> M. To have a place at all, a token that does not stay is mapped to the one before it that does,
    or to the first unprotected one, where it counts for nothing.
    """

    index: Tensor
    assignment: Assignment
    weights: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """The tokens that stay: B N C -> B M C."""
        return torch.take_along_dim(x, self.index[..., None], dim=1)


def keep_topk(scores: Tensor, keep: int, *, protected: int) -> TopK:
    """Keep the protected tokens and, of the others, those with the `keep` largest scores (B n)."""
    batch, tokens = scores.shape[0], protected + scores.shape[1]
    best = protected + scores.topk(keep, dim=1).indices.sort(dim=1).values
    first = torch.arange(protected, device=scores.device).expand(batch, -1)
    index = torch.cat([first, best], dim=1)
    stays = torch.zeros(batch, tokens, dtype=torch.long, device=scores.device).scatter(1, index, 1)
    slots = torch.maximum(stays.cumsum(1) - 1, torch.arange(tokens, device=scores.device).clamp_max(protected))
    return TopK(index, Assignment(slots, protected + keep), stays.float())


# MERGED from mctf.core.selection:
# Tokens that each image keeps for itself, packed to the front and padded to the fullest image of the batch.
#
# Images of a batch may keep different numbers of tokens. The tokens that stay move up in their old order; a shorter image
# gets padding behind them, rows of zeros with size 0 that nobody attends to. After the last block, copies of its last
# token take their place.
#
# Axes: B images, N tokens before, M after: as many as the image keeps that keeps most.


@dataclass(frozen=True)
class Ragged:
    """Where the tokens that stay go.

    assignment: B N -> M. To have a place at all, a token that goes is mapped to the last one before it that stays, or
    to the first unprotected one that stays where there is none before; weights: B N, 1 for tokens that stay, 0 for
    those that go. kept: B M, the token in each place, any one in padding. present: B M, False in padding; None while
    no image is padded.
    """

    assignment: Assignment
    weights: Tensor
    kept: Tensor
    present: Tensor | None

    @property
    def sizes(self) -> Tensor | None:
        """B M, float32: 1 for tokens, 0 for padding; None where there is none."""
        return None if self.present is None else self.present.float()

    def gather(self, x: Tensor) -> Tensor:
        """What belongs to the tokens that stay, and zeros in padding: B N … -> B M …."""
        trailing = (1,) * (x.dim() - 2)
        picked = x.gather(1, self.kept.view(*self.kept.shape, *trailing).expand(-1, -1, *x.shape[2:]))
        return (
            picked if self.present is None else picked.masked_fill(~self.present.view(*self.kept.shape, *trailing), 0)
        )


@torch.compiler.disable(reason="how many tokens remain depends on the images: compile without fullgraph=True")
def pack_ragged(stays: Tensor, *, protected: int) -> Ragged | None:
    """The packing of tokens by whether they stay (B N, bool, at least one of each image); None where all stay.

    protected: that many leading tokens always stay.
    """
    tokens = stays.shape[1]
    counts = stays.sum(dim=1)
    fewest, most = torch.stack(counts.aminmax()).tolist()
    if fewest == tokens:
        return None
    place = torch.arange(tokens, device=stays.device)
    earliest = torch.where(place < protected, 0, (counts[:, None] - 1).clamp_max(protected))
    slots = torch.maximum(stays.cumsum(1) - 1, earliest)
    kept = (~stays).int().argsort(dim=1, stable=True)[:, :most]
    present = None if fewest == most else place[:most] < counts[:, None]
    return Ragged(Assignment(slots, most), stays.float(), kept, present)


def fill_padding(x: Tensor, sizes: Tensor | None) -> Tensor:
    """Tokens (B M C) with the last one of each image in the place of its padding.

    A head that takes reduced tokens as they are cannot mind how often a token is there; zeros it might.
    """
    if sizes is None:
        return x
    last = (sizes > 0).sum(dim=1, keepdim=True) - 1
    index = torch.minimum(torch.arange(x.shape[1], device=x.device), last)
    return x.gather(1, index[..., None].expand_as(x))
