"""Bipartite soft matching, one-way and bidirectional (paper, section 3.2, steps 1 to 4 of its figure).

Tokens alternate between two sides, alpha (even places) and beta (odd places). Protected tokens (class,
distillation, registers) are the first ones; they are on neither side and keep the first slots.

Axes: B images, N tokens, Na and Nb unprotected tokens on the two sides.
"""

from dataclasses import dataclass

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


# MERGED from mctf.core.matching:
# How strongly two tokens attract each other: similarity, informativeness and size (paper, section 3.2).
#
# Axes: B images, N tokens, C channels; Na and Nb the tokens of the two sides of the bipartite split.

TINY = 1e-30  # an attention mass may underflow to 0; its logarithm must not


def unit_rows(x: Tensor) -> Tensor:
    """Rows of length 1 in at least float32: near-ties between pairs are decided by the last bits."""
    x = at_least_float32(x)
    return x / x.norm(dim=-1, keepdim=True).clamp_min(TINY)


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class Criteria:
    """Temperatures of the three criteria; 0 switches one off."""

    tau_sim: float = 1.0
    tau_info: float = 1 / 20
    tau_size: float = 1 / 40


def total_received(received: Tensor) -> Tensor:
    """Informativeness from its parts, B G N -> B N; a token nobody attends to still counts for something."""
    return received.sum(dim=1).clamp_min(TINY)


def pair_scores(
    x: Tensor, informativeness: Tensor, sizes: Tensor | None, criteria: Criteria, *, protected: int
) -> Tensor:
    """How strongly each alpha token attracts each beta token, protected ones left out: B Na Nb, at least 0.

    W_ij = ((cos(x_i, x_j) + 1) / 2)^tau_sim * (1 / (a_i a_j))^tau_info * (1 / (s_i s_j))^tau_size
    """
    unit = unit_rows(x)
    scores = (alpha(unit, protected) @ beta(unit, protected).transpose(1, 2) + 1) / 2
    if criteria.tau_sim != 1:
        scores = scores.clamp_min(0).pow(criteria.tau_sim)
    alone = token_factor(informativeness, sizes, criteria)
    if alone is None:
        return scores
    return scores * alpha(alone, protected)[:, :, None] * beta(alone, protected)[:, None, :]


def token_factor(informativeness: Tensor, sizes: Tensor | None, criteria: Criteria) -> Tensor | None:
    """What a single token adds to all its pairs: a^-tau_info * s^-tau_size, B N; None when both are off.

    The paper's W_info = 1 / (a_i a_j) and W_size = 1 / (s_i s_j) are products of one factor a token, so they
    need no N x N arithmetic of their own.
    """
    exponent = None
    if criteria.tau_info:
        exponent = -criteria.tau_info * informativeness.clamp_min(TINY).log()
    if criteria.tau_size and sizes is not None:
        by_size = -criteria.tau_size * sizes.log()
        exponent = by_size if exponent is None else exponent + by_size
    return None if exponent is None else exponent.exp()
