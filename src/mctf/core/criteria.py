"""How strongly two tokens attract each other: similarity, informativeness and size (paper, section 3.2).

Axes: B images, N tokens, C channels; Na and Nb the tokens of the two sides of the bipartite split.
"""

import torch
from torch import Tensor

_TINY = 1e-30  # an attention mass may underflow to 0; its logarithm must not


def unit_rows(x: Tensor) -> Tensor:
    """Rows of length 1 in at least float32: near-ties between pairs are decided by the last bits."""
    x = at_least_float32(x)
    return x / x.norm(dim=-1, keepdim=True).clamp_min(_TINY)


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def isolation(informativeness: Tensor, sizes: Tensor | None, *, tau_info: float, tau_size: float) -> Tensor | None:
    """What a single token adds to all its pairs: a^-tau_info * s^-tau_size, B N; None when both are off.

    The paper's W_info = 1 / (a_i a_j) and W_size = 1 / (s_i s_j) are products of one factor a token, so they
    need no N x N arithmetic of their own.
    """
    exponent = None
    if tau_info:
        exponent = -tau_info * informativeness.clamp_min(_TINY).log()
    if tau_size and sizes is not None:
        size_part = -tau_size * sizes.log()
        exponent = size_part if exponent is None else exponent + size_part
    return None if exponent is None else exponent.exp()


def attraction(sources: Tensor, targets: Tensor, *, tau_sim: float) -> Tensor:
    """W_sim = ((cos(x_i, x_j) + 1) / 2)^tau_sim of unit rows: B Na Nb in [0, 1]."""
    similarity = (sources @ targets.transpose(1, 2) + 1) / 2
    if tau_sim == 1:
        return similarity
    return similarity.clamp_min(0).pow(tau_sim)
