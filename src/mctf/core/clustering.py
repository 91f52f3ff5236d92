"""Clustering by Ward's cost in a few parallel rounds: which tokens of an image become one.

The cost of fusing two tokens is the growth of the weighted squared error when both are replaced by their weighted mean,

    w_i w_j / (w_i + w_j) * |u_i - u_j|^2

with u the tokens divided by their norms. Exact agglomeration fuses the cheapest pair again and again. A round does it
for many pairs at once: the tokens that are cheapest to join another one of larger weight do so, each the cheapest of
those that stay. Weights add up, centers become weighted means. The first round compares all pairs and chooses the
candidates, the cheapest tokens; only these join others, in whatever round, so that later rounds compare few pairs.

Protected tokens (class, distillation, registers) come first, take no part and keep the first slots.

Axes: B images, N tokens, n of them unprotected, C channels, K candidates, k tokens that join in a round.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from . import portable
from .assignment import Assignment
from .attention import TINY
from .matching import unit_rows

_LARGEST = 1e6  # a weight: attention received is at most 1, the root of a size at most 1,000


def token_weights(informativeness: Tensor, sizes: Tensor | None) -> Tensor:
    """The weight of each token, a * sqrt(s): B N.

    The attention a that a token receives grows with its size already; times s, large tokens would never be fused.
    """
    weights = informativeness if sizes is None else informativeness * sizes.sqrt()
    if portable.exporting():
        return weights.clamp_min(TINY)
    return weights.nan_to_num(nan=TINY, posinf=_LARGEST).clamp_min(TINY)  # images of undefined numbers are fused, too


def joining_per_round(r: int, rounds: int) -> Iterator[int]:
    """Tokens that join in each round, r in all: twice as many in the first of two, one each in r rounds."""
    for left in range(min(rounds, r), 0, -1):
        k = max(1, 2 * r // (left + 1))
        yield k
        r -= k


def num_candidates(r: int, unprotected: int, candidates: float) -> int:
    """Tokens that may join another one, where r do."""
    return min(unprotected, (r * math.ceil(100 * min(candidates, unprotected)) + 99) // 100)


def cluster(x: Tensor, weights: Tensor, r: int, *, protected: int, rounds: int, candidates: float) -> Assignment:
    """Fuse r tokens of x (B N C) into others: N tokens to N - r slots, the tokens that stay in their old order.

    weights: B N, above 0. Of equal weights the earlier counts as larger. candidates: per token that joins.
    """
    unit = unit_rows(x)[:, protected:]
    n = unit.shape[1]
    # from here on, the heaviest tokens come first
    mass, order = weights[:, protected:].to(unit.dtype).sort(dim=1, descending=True, stable=True)
    unit = portable.gather_rows(unit, order)
    index = torch.arange(n, device=x.device)
    apart = (1 - unit @ unit.transpose(1, 2)).nan_to_num_(nan=2.0)  # half the squared distances
    costs = _costs(apart, mass, mass).masked_fill_(index >= index[:, None], float("inf"))
    rows = costs.amin(dim=2).topk(num_candidates(r, n, candidates), dim=1, largest=False).indices
    costs, apart = portable.gather_rows(costs, rows), portable.gather_rows(apart, rows)  # B K n
    within = torch.zeros_like(mass)  # half the mean squared distance between two members of a cluster
    joined: list[Tensor] = []
    targets: list[Tensor] = []
    for k in joining_per_round(r, rounds):
        if joined:
            costs = _remaining_costs(apart, within, mass, rows)
            position = costs.amin(dim=2).topk(rows.shape[1], dim=1, largest=False).indices
            rows, costs = rows.gather(1, position), portable.gather_rows(costs, position[:, :k])
            apart = portable.gather_rows(apart, position)
        joining, rows = rows[:, :k], rows[:, k:]
        leaves = (joining[:, :, None] == index).any(dim=1, keepdim=True)  # B 1 n
        target = costs[:, :k].masked_fill(leaves, float("inf")).argmin(dim=2)
        joined.append(joining)
        targets.append(target)
        if sum(each.shape[1] for each in joined) < r:
            apart, within, mass = _join(apart, within, mass, joining, target, rows)
    return _assignment(torch.cat(joined, dim=1), torch.cat(targets, dim=1), order, len(joined), protected=protected)


def _costs(apart: Tensor, mine: Tensor, mass: Tensor) -> Tensor:
    """Half of Ward's costs: B K n. apart: half the squared distances, B K n. mine, mass: weights, B K and B n."""
    return apart / (mine.reciprocal()[:, :, None] + mass.reciprocal()[:, None])


def _remaining_costs(apart: Tensor, within: Tensor, mass: Tensor, rows: Tensor) -> Tensor:
    """`_costs` of the tokens `rows` (B K), inf for joining one that is not larger.

    Centers are mean distances, less half of those within both clusters, apart. Tokens that joined have weight 0:
    nothing is lighter.
    """
    ranked = portable.strictly_descending(mass)
    is_larger = ranked[:, None] > ranked.gather(1, rows)[:, :, None]
    half = within / 2
    costs = _costs(apart - half.gather(1, rows)[:, :, None] - half[:, None], mass.gather(1, rows), mass)
    return costs.masked_fill_(~is_larger, float("inf"))


def _join(
    apart: Tensor, within: Tensor, mass: Tensor, joining: Tensor, target: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean distances of the tokens `rows` (B K), means within clusters and weights (B n) once k tokens have joined.

    apart: B k+K n, of the tokens `joining` (B k), then of the others. target: B k, whom they join.
    """
    k = target.shape[1]
    w_joining = mass.gather(1, joining)
    mass = mass.scatter_add(1, target, w_joining).scatter_(1, joining, 0)
    shares = w_joining / mass.gather(1, target)
    stays = 1 - torch.zeros_like(mass).scatter_add(1, target, shares)

    into = target[:, :, None] == torch.arange(mass.shape[1], device=mass.device)  # B k n
    columns = apart.gather(2, joining[:, None].expand(-1, apart.shape[1], -1))
    mixed = torch.baddbmm(apart * stays[:, None], columns, into * shares[:, :, None])
    before, after = (each[:, :k].gather(2, target[:, :, None])[:, :, 0] * shares for each in (apart, mixed))
    within = (stays * within).scatter_add(1, target, before)
    within = (stays * within).scatter_add(1, target, after)
    # rows of clusters that others joined: means of their members' rows, too
    is_target = (rows[:, :, None] == target[:, None]) * shares[:, None]  # B K k
    others = mixed[:, k:] * stays.gather(1, rows)[:, :, None]
    return torch.baddbmm(others, is_target, mixed[:, :k]), within, mass


def _assignment(joined: Tensor, targets: Tensor, order: Tensor, rounds: int, *, protected: int) -> Assignment:
    """From the tokens that joined (B r) and those that they joined (B r), both as positions in `order` (B n)."""
    root = torch.arange(order.shape[1], device=order.device).expand_as(order).scatter(1, joined, targets)
    for _ in range((rounds - 1).bit_length()):  # a target may join another in a later round
        root = root.gather(1, root)
    root = torch.empty_like(order).scatter_(1, order, order.gather(1, root))
    return Assignment.of_roots(root, order.shape[1] - joined.shape[1], protected=protected)


def cluster_exported(
    x: Tensor, weights: Tensor, r: int, *, protected: int, rounds: int, candidates: float
) -> Assignment:
    """`cluster` in the form for exported graphs."""
    unit = unit_rows(x)[:, protected:]
    count = num_candidates(r, unit.shape[1], candidates)
    all_k = tuple(joining_per_round(r, rounds))
    slots, split = portable.cluster(unit, weights[:, protected:, None], all_k, candidates=count, protected=protected)
    return Assignment(slots, x.shape[1] - r, split=split)
