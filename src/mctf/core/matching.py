"""Bipartite soft matching, one-way and bidirectional (paper, section 3.2, steps 1 to 4 of its figure).

Tokens alternate between two sides, alpha (even places) and beta (odd places). Protected tokens (class,
distillation, registers) are the first ones; they are on neither side and keep the first slots.

Axes: B images, N tokens, Na and Nb unprotected tokens on the two sides.
"""

import torch
from torch import Tensor

from .assignment import Assignment


def alpha(x: Tensor, protected: int) -> Tensor:
    """The unprotected tokens in even places: B Na …."""
    return x[:, protected + protected % 2 :: 2]


def beta(x: Tensor, protected: int) -> Tensor:
    """The unprotected tokens in odd places: B Nb …."""
    return x[:, protected + 1 - protected % 2 :: 2]


def match_one_way(scores: Tensor, r: int, *, protected: int) -> Assignment:
    """Fuse the r alpha tokens with the strongest best pair into their beta token.

    scores: B Na Nb. Output order: protected, remaining alpha in old order, all beta in old order.
    """
    strength, target = scores.max(dim=2)
    leaves = rank_descending(strength) < r
    alpha_kept = protected + (~leaves).cumsum(1) - 1
    beta_slots = torch.arange(scores.shape[2], device=scores.device) + (protected + scores.shape[1] - r)
    alpha_slots = torch.where(leaves, beta_slots[target], alpha_kept)
    return _join(alpha_slots, beta_slots.expand(scores.shape[0], -1), protected, r)


def match_bidirectional(scores: Tensor, r: int, *, protected: int) -> Assignment:
    """Fuse r // 2 alpha tokens into beta, then the rest of r beta tokens into the remaining alpha.

    scores: B Na Nb, used for both directions as in the paper. A beta token that leaves takes along what it
    absorbed. Output order: protected, remaining alpha in old order, remaining beta by falling strength. The
    order matters: the next block splits by parity.
    """
    forth = r // 2
    back = r - forth
    strength, target = scores.max(dim=2)
    leaves = rank_descending(strength) < forth
    alpha_kept = protected + (~leaves).cumsum(1) - 1

    strength, host = scores.masked_fill(leaves[:, :, None], float("-inf")).max(dim=1)
    rank = rank_descending(strength)
    first_beta_slot = protected + scores.shape[1] - forth
    beta_slots = torch.where(rank < back, alpha_kept.gather(1, host), rank + (first_beta_slot - back))
    alpha_slots = torch.where(leaves, beta_slots.gather(1, target), alpha_kept)
    return _join(alpha_slots, beta_slots, protected, r)


def rank_descending(values: Tensor) -> Tensor:
    """Place of each value when sorted from large to small, equal values by index: B n."""
    order = values.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(values.shape[1], device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def _join(alpha_slots: Tensor, beta_slots: Tensor, protected: int, r: int) -> Assignment:
    """Weave the slots of both sides back into token order, protected tokens first."""
    batch = alpha_slots.shape[0]
    tokens = protected + alpha_slots.shape[1] + beta_slots.shape[1]
    slots = torch.arange(tokens, device=alpha_slots.device).repeat(batch, 1)
    alpha(slots, protected).copy_(alpha_slots)
    beta(slots, protected).copy_(beta_slots)
    return Assignment(slots, tokens - r)
