"""Pair scores and bipartite soft matching, one-way and bidirectional (paper, section 3.2).

Tokens alternate between two sides, alpha (even positions) and beta (odd positions). Protected tokens (class,
distillation, registers) come first; they are on neither side and keep the first slots.

Axes: B images, N tokens, C channels; Na and Nb unprotected tokens on the two sides.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import portable
from .assignment import Assignment
from .attention import TINY, at_least_float32


@dataclass(frozen=True)
class Criteria:
    """Temperatures of similarity, informativeness and size; 0 switches a criterion off."""

    tau_sim: float = 1.0
    tau_info: float = 1 / 20
    tau_size: float = 1 / 40


def pair_scores(
    x: Tensor, informativeness: Tensor, sizes: Tensor | None, criteria: Criteria, *, protected: int
) -> Tensor:
    """Score of merging each alpha token with each beta token, protected ones left out: B Na Nb, at least 0.

    W_ij = ((cos(x_i, x_j) + 1) / 2)^tau_sim * (1 / (a_i a_j))^tau_info * (1 / (s_i s_j))^tau_size
    """
    unit = unit_rows(x)
    scores = (alpha(unit, protected) @ beta(unit, protected).transpose(1, 2) + 1) / 2
    if criteria.tau_sim != 1:
        scores = scores.clamp_min(0).pow(criteria.tau_sim)
    factor = token_factor(informativeness, sizes, criteria)
    if factor is None:
        return scores
    return scores * alpha(factor, protected)[:, :, None] * beta(factor, protected)[:, None, :]


def token_factor(informativeness: Tensor, sizes: Tensor | None, criteria: Criteria) -> Tensor | None:
    """The factor of one token in all its pair scores: a^-tau_info * s^-tau_size, B N; None when both are off.

    The paper's W_info = 1 / (a_i a_j) and W_size = 1 / (s_i s_j) are products of one factor per token, so they need no
    N x N arithmetic of their own.
    """
    exponent = None
    if criteria.tau_info:
        exponent = -criteria.tau_info * informativeness.clamp_min(TINY).log()
    if criteria.tau_size and sizes is not None:
        by_size = -criteria.tau_size * sizes.log()
        exponent = by_size if exponent is None else exponent + by_size
    return None if exponent is None else exponent.exp()


def unit_rows(x: Tensor) -> Tensor:
    """Rows of length 1 in at least float32: near-ties between pairs are decided by the last bits."""
    x = at_least_float32(x)
    return x / x.norm(dim=-1, keepdim=True).clamp_min(TINY)


def alpha(x: Tensor, protected: int) -> Tensor:
    """The unprotected tokens at even positions: B Na …."""
    return x[:, protected + protected % 2 :: 2]


def beta(x: Tensor, protected: int) -> Tensor:
    """The unprotected tokens at odd positions: B Nb …."""
    return x[:, protected + 1 - protected % 2 :: 2]


def match_one_way(scores: Tensor, r: int, *, protected: int) -> Assignment:
    """Merge the r alpha tokens with the highest best score into their beta token.

    scores: B Na Nb. Output order: protected, remaining alpha in old order, all beta in old order.
    """
    best, target = scores.max(dim=2)
    merged = rank_descending(best) < r
    alpha_kept = protected + (~merged).cumsum(1) - 1
    beta_slots = torch.arange(scores.shape[2], device=scores.device) + (protected + scores.shape[1] - r)
    alpha_slots = torch.where(merged, beta_slots[target], alpha_kept)
    return _join(alpha_slots, beta_slots.expand(scores.shape[0], -1), protected, r)


def match_bidirectional(scores: Tensor, r: int, *, protected: int) -> Assignment:
    """Merge r // 2 alpha tokens into beta, then the rest of r beta tokens into the remaining alpha.

    scores: B Na Nb, used for both directions as in the paper. A merged beta token takes along what it absorbed. Output
    order: protected, remaining alpha in old order, remaining beta by falling score. The order matters: the next block
    splits by parity.
    """
    forth = r // 2
    back = r - forth
    best, target = scores.max(dim=2)
    merged = rank_descending(best) < forth
    alpha_kept = protected + (~merged).cumsum(1) - 1

    best, destination = scores.masked_fill(merged[:, :, None], float("-inf")).max(dim=1)
    rank = rank_descending(best)
    first_beta_slot = protected + scores.shape[1] - forth
    beta_slots = torch.where(rank < back, alpha_kept.gather(1, destination), rank + (first_beta_slot - back))
    alpha_slots = torch.where(merged, beta_slots.gather(1, target), alpha_kept)
    return _join(alpha_slots, beta_slots, protected, r)


def rank_descending(values: Tensor) -> Tensor:
    """Rank of each value when sorted from large to small, equal values by index: B n."""
    if portable.exporting():
        return portable.rank_descending(values)
    order = order_descending(values)
    ranks = torch.arange(values.shape[1], device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, ranks)


def order_descending(values: Tensor) -> Tensor:
    """Indices of the values from large to small, equal values by index: B n."""
    if portable.exporting():  # ranks have no ties, which other runtimes break in their own ways
        return portable.rank_descending(values).argsort(dim=1)
    return values.argsort(dim=1, descending=True, stable=True)


def _join(alpha_slots: Tensor, beta_slots: Tensor, protected: int, r: int) -> Assignment:
    """Interleave the slots of both sides in token order, protected tokens first. Nothing is written in place: vmap."""
    even, odd = (alpha_slots, beta_slots) if protected % 2 == 0 else (beta_slots, alpha_slots)
    n = even.shape[1] + odd.shape[1]
    pairs = torch.stack([even, F.pad(odd, (0, n % 2))], dim=2)  # as many or one fewer of the second
    slots = portable.prepend_protected(pairs.flatten(1)[:, :n], protected)
    return Assignment(slots, protected + n - r)
