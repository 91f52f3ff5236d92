"""How strongly two tokens attract each other: similarity, informativeness and size (paper, section 3.2).

Axes: B images, N tokens, C channels; Na and Nb the tokens of the two sides of the bipartite split.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .matching import alpha, beta

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


def attraction(
    x: Tensor, informativeness: Tensor, sizes: Tensor | None, criteria: Criteria, *, protected: int
) -> Tensor:
    """How strongly each alpha token attracts each beta token, protected ones left out: B Na Nb, at least 0.

    W_ij = ((cos(x_i, x_j) + 1) / 2)^tau_sim * (1 / (a_i a_j))^tau_info * (1 / (s_i s_j))^tau_size
    """
    unit = unit_rows(x)
    scores = (alpha(unit, protected) @ beta(unit, protected).transpose(1, 2) + 1) / 2
    if criteria.tau_sim != 1:
        scores = scores.clamp_min(0).pow(criteria.tau_sim)
    alone = isolation(informativeness, sizes, criteria)
    if alone is None:
        return scores
    return scores * alpha(alone, protected)[:, :, None] * beta(alone, protected)[:, None, :]


def isolation(informativeness: Tensor, sizes: Tensor | None, criteria: Criteria) -> Tensor | None:
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
