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

    distances: B n n, squared; overwritten. weights: B N, above 0. Of equal weights the earlier counts as larger.
    """
    batch, n, _ = distances.shape
    index = torch.arange(n, device=distances.device)
    later = index[None, :] >= index[:, None]
    mass = weights[:, protected:].to(distances.dtype)
    root = index.expand(batch, -1)
    for number, k in enumerate(_joining_per_round(r, rounds), start=1):
        costs = _join_costs(distances, mass, later)
        joining = costs.amin(dim=2).masked_fill_(mass == 0, float("inf")).topk(k, dim=1, largest=False).indices
        partner = costs.gather(1, joining[:, :, None].expand(-1, -1, n)).argmin(dim=2)  # of all tokens it takes longer
        parent = index.expand(batch, -1).scatter(1, joining, partner)
        for _ in range((k - 1).bit_length()):  # a partner may join another: chains of at most k tokens
            parent = parent.gather(1, parent)
        root = parent.gather(1, root)
        if number < min(rounds, r):
            mass = _join(distances, mass, joining, parent.gather(1, joining))
    return Assignment.of_roots(root, n - r, protected=protected)


def cluster_exported(x: Tensor, weights: Tensor, r: int, *, protected: int, rounds: int) -> Assignment:
    """`cluster` of tokens x (B N C) in the form for exported graphs."""
    unit, mass = unit_rows(x)[:, protected:], weights[:, protected:]
    root, split = portable.cluster(unit, mass, _joining_per_round(r, rounds), protected=protected)
    return replace(Assignment.of_roots(root, root.shape[1] - r, protected=protected), split=split)


def _joining_per_round(r: int, rounds: int) -> list[int]:
    """r in equal parts, the remainder in the first rounds."""
    rounds = min(rounds, r)
    return [r // rounds + (number < r % rounds) for number in range(rounds)]


def _join_costs(distances: Tensor, mass: Tensor, later: Tensor) -> Tensor:
    """Ward's cost of joining a token of larger weight (of equal ones, no `later`), inf for the other pairs: B n n.

    distances: mean squared distances E between the members of clusters. Their centers are E_ab - E_aa / 2 - E_bb / 2
    apart. A token of weight 0 is part of another cluster: nobody joins it, and its own row is to be ignored.
    """
    own, inverse = distances.diagonal(dim1=1, dim2=2) / 2, 1 / mass
    apart = distances - own[:, :, None] - own[:, None, :]
    costs = apart.div_(inverse[:, :, None] + inverse[:, None, :])
    mine, other = mass[:, :, None], mass[:, None, :]
    return costs.masked_fill_((other < mine) | ((other == mine) & later), float("inf"))


def _join(distances: Tensor, mass: Tensor, joining: Tensor, target: Tensor) -> Tensor:
    """Weights (B n) once the tokens `joining` (B k) are part of `target` (B k).

    Rows and columns of `target` become mean distances of the larger clusters.
    """
    n = distances.shape[1]
    w_joining, w_target = mass.gather(1, joining), mass.gather(1, target)
    mass = mass.scatter_add(1, target, w_joining).scatter_(1, joining, 0)
    total = mass.gather(1, target)
    same = target[:, :, None] == target[:, None, :]
    mix, share = same * (w_joining / total)[:, None, :], (w_target / total)[:, :, None]

    rows, own_rows = joining[:, :, None].expand(-1, -1, n), target[:, :, None].expand(-1, -1, n)
    means = torch.baddbmm(share * distances.gather(1, own_rows), mix, distances.gather(1, rows))
    distances.scatter_(1, own_rows, means)
    columns, own_columns = joining[:, None, :].expand(-1, n, -1), target[:, None, :].expand(-1, n, -1)
    means = torch.baddbmm(
        share.transpose(1, 2) * distances.gather(2, own_columns), distances.gather(2, columns), mix.transpose(1, 2)
    )
    distances.scatter_(2, own_columns, means)
    return mass
