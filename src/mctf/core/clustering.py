"""Clustering by Ward's cost in a few parallel rounds: which tokens of an image become one.

The cost of fusing two tokens is the growth of the weighted squared error when both are replaced by their weighted mean,

    w_i w_j / (w_i + w_j) * |u_i - u_j|^2

with u the tokens divided by their norms. Exact agglomeration fuses the cheapest pair again and again. A round does it
for many pairs at once: every token seeks its cheapest partner among those of larger weight, and the cheapest tokens
join theirs. Distances between clusters follow from those between tokens (Lance and Williams): one matrix product.

Protected tokens (class, distillation, registers) come first, take no part and keep the first slots.

Axes: B images, N tokens, n of them unprotected, C channels, k tokens that join in a round.
"""

from dataclasses import replace

import torch
from torch import Tensor

from . import portable
from .assignment import Assignment
from .attention import TINY
from .matching import unit_rows

_FARTHEST = 4.0  # squared distance of opposite unit vectors


def token_weights(informativeness: Tensor, sizes: Tensor | None) -> Tensor:
    """The weight of each token, a * sqrt(s): B N.

    The attention a that a token receives grows with its size already; times s, large tokens would never be fused.
    """
    weights = informativeness if sizes is None else informativeness * sizes.sqrt()
    if portable.exporting():
        return weights.clamp_min(TINY)
    return weights.nan_to_num(nan=TINY, posinf=1 / TINY).clamp_min(TINY)  # images of undefined numbers are fused, too


def squared_distances(x: Tensor, *, protected: int) -> Tensor:
    """Squared distances between the unprotected tokens, each divided by its norm: B n n, float32 or wider."""
    unit = unit_rows(x[:, protected:])
    return (2 - 2 * (unit @ unit.transpose(1, 2))).nan_to_num_(nan=_FARTHEST).clamp_min_(0)


def cluster(distances: Tensor, weights: Tensor, r: int, *, protected: int, rounds: int) -> Assignment:
    """Fuse r tokens into others: N tokens to N - r slots, the tokens that stay in their old order.

    distances: B n n, squared; overwritten. weights: B N, above 0.
    """
    batch, n, _ = distances.shape
    mass = weights[:, protected:].to(distances.dtype)
    index = torch.arange(n, device=distances.device)
    root = index.expand(batch, -1)
    for number in range(min(rounds, r)):
        last = number == min(rounds, r) - 1
        k = _share(r, min(rounds, r), number)
        best, partner = _cheapest_partners(distances, mass)
        joining = best.topk(k, dim=1, largest=False).indices
        parent = index.expand(batch, -1).scatter(1, joining, partner.gather(1, joining))
        for _ in range((k - 1).bit_length()):  # a partner may join another: chains of at most k tokens
            parent = parent.gather(1, parent)
        root = parent.gather(1, root)
        if not last:
            distances, mass = _join(distances, mass, joining, parent)
    return Assignment.of_roots(root, n - r, protected=protected)


def cluster_exported(x: Tensor, weights: Tensor, r: int, *, protected: int, rounds: int) -> Assignment:
    """`cluster` of tokens x (B N C) in the form for exported graphs."""
    shares = [_share(r, min(rounds, r), number) for number in range(min(rounds, r))]
    unit, mass = unit_rows(x)[:, protected:], weights[:, protected:]
    root, split = portable.cluster(unit, mass, shares, protected=protected)
    assignment = Assignment.of_roots(root, root.shape[1] - r, protected=protected)
    return replace(assignment, split=split)


def _share(r: int, rounds: int, number: int) -> int:
    """Tokens that join in one round: r in equal parts, the remainder in the first rounds."""
    each, remainder = divmod(r, rounds)
    return each + (number < remainder)


def _cheapest_partners(distances: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Per token the lowest cost of joining a token of larger weight (of equal ones, an earlier), and that token: B n.

    Tokens of weight 0 have joined before: they neither join nor are joined. Their cost is inf, as that of the largest.
    """
    inverse = 1 / mass
    costs = distances / (inverse[:, :, None] + inverse[:, None, :])
    mine, other = mass[:, :, None], mass[:, None, :]
    index = torch.arange(mass.shape[1], device=mass.device)
    earlier = index[None, :] < index[:, None]
    allowed = (other > mine) | ((other == mine) & earlier)
    best, partner = costs.masked_fill(~allowed, float("inf")).min(dim=2)
    return best.masked_fill(mass == 0, float("inf")), partner


def _join(distances: Tensor, mass: Tensor, joining: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Distances and weights once the tokens `joining` (B k) are part of their parents (B n); their weight is then 0.

    With p the shares of tokens in their cluster and D the distances, E = P D PT are mean distances between members,
    and the centers are E_ab - E_aa / 2 - E_bb / 2 apart.
    """
    n = distances.shape[1]
    total = torch.zeros_like(mass).scatter_add(1, parent, mass)
    share = mass / total.gather(1, parent).clamp_min(torch.finfo(mass.dtype).tiny)
    target = parent.gather(1, joining)
    means = distances * share[:, :, None]
    rows = joining[:, :, None].expand(-1, -1, n)
    means = means.scatter_add(1, target[:, :, None].expand(-1, -1, n), means.gather(1, rows))
    means = means * share[:, None, :]
    columns = joining[:, None, :].expand(-1, n, -1)
    means = means.scatter_add(2, target[:, None, :].expand(-1, n, -1), means.gather(2, columns))
    own = means.diagonal(dim1=1, dim2=2) / 2
    return (means - own[:, :, None] - own[:, None, :]).clamp_min(0), total
