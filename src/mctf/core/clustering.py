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
_FAR = 1e37  # above every cost; divided by the ratio of any two weights it still is
_STEP = 4  # of rounding, by which a token's weight is smaller than that of an equal one before it


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
    mass, order = _heaviest_first(weights[:, protected:].to(unit.dtype))  # from here on, tokens are in this order
    unit = portable.gather_rows(unit, order)
    index = torch.arange(n, device=x.device)
    apart = 1 - unit @ unit.transpose(1, 2)  # half the squared distances
    if not portable.exporting():
        apart = apart.nan_to_num_(nan=2.0)
    costs = _costs(apart + (index >= index[:, None]) * _FAR, mass, mass)
    rows = (costs.amin(dim=2) * mass).topk(num_candidates(r, n, candidates), dim=1, largest=False).indices
    costs, apart = portable.gather_rows(costs, rows), portable.gather_rows(apart, rows)  # B K n
    within = torch.zeros_like(mass)  # half the mean squared distance between two members of a cluster
    joined: list[Tensor] = []
    targets: list[Tensor] = []
    for k in joining_per_round(r, rounds):
        if joined:
            costs = _remaining_costs(apart, within, mass, rows)
            position = (costs.amin(dim=2) * mass.gather(1, rows)).topk(rows.shape[1], dim=1, largest=False).indices
            rows, costs = rows.gather(1, position), portable.gather_rows(costs, position[:, :k])
            apart = portable.gather_rows(apart, position)
        joining, rows = rows[:, :k], rows[:, k:]
        leaves = (joining[:, :, None] == index).to(mass.dtype)  # B k n
        target = (costs[:, :k] + leaves.sum(dim=1, keepdim=True) * _FAR).argmin(dim=2)
        joined.append(joining)
        targets.append(target)
        if rows.shape[1] and sum(each.shape[1] for each in joined) < r:
            apart, within, mass = _join(apart, within, mass, leaves, target, rows)
    return _assignment(torch.cat(joined, dim=1), torch.cat(targets, dim=1), order, len(joined), protected=protected)


def _heaviest_first(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (B n) from large to small, and the tokens that have them; of equal ones the earlier first."""
    if not portable.exporting():
        return weights.sort(dim=1, descending=True, stable=True)
    order = _strictly_descending(weights).topk(weights.shape[1], dim=1).indices
    return weights.gather(1, order), order


def _strictly_descending(weights: Tensor) -> Tensor:
    """Weights (B n) for comparison: equal ones become smaller from token to token, by steps of rounding."""
    step = _STEP * torch.finfo(weights.dtype).eps
    return weights * (1 - step * torch.arange(weights.shape[1], device=weights.device, dtype=weights.dtype))


def _costs(apart: Tensor, mine: Tensor, mass: Tensor) -> Tensor:
    """Half of Ward's cost of joining, divided by the own weight: B K n.

    apart: half the squared distances, B K n. mine, mass: weights, B K and B n.
    """
    return apart / (mine[:, :, None] * mass.reciprocal()[:, None] + 1)


def _remaining_costs(apart: Tensor, within: Tensor, mass: Tensor, rows: Tensor) -> Tensor:
    """`_costs` of the tokens `rows` (B K); `_FAR` for joining one that is not larger.

    Centers are mean distances, less half of those within both clusters, apart. Tokens that joined have weight 0:
    nothing is lighter.
    """
    ranked = _strictly_descending(mass)
    is_larger = ranked[:, None] > ranked.gather(1, rows)[:, :, None]
    half = within / 2
    costs = _costs(apart - half.gather(1, rows)[:, :, None] - half[:, None], mass.gather(1, rows), mass)
    return costs.where(is_larger, _FAR)


def _join(
    apart: Tensor, within: Tensor, mass: Tensor, leaves: Tensor, target: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean distances of the tokens `rows` (B K), means within clusters and weights (B n) once k tokens have joined.

    apart: B k+K n, of the tokens that join, then of the others. leaves: B k n, one-hot. target: B k, whom they join.
    """
    k = target.shape[1]
    index = torch.arange(mass.shape[1], device=mass.device)
    into = (target[:, :, None] == index).to(mass.dtype)  # B k n
    w_joining = (leaves @ mass[:, :, None])[:, :, 0]
    mass = (mass + _sum_into(w_joining, into)) * (1 - leaves.sum(dim=1))
    shares = w_joining / mass.gather(1, target)
    stays = 1 - _sum_into(shares, into)

    moves = (leaves - into) * shares[:, :, None]
    mixed = torch.baddbmm(apart, apart @ moves.transpose(1, 2), into)
    before, after = ((each[:, :k] * into).sum(dim=2) for each in (apart, mixed))
    within = stays * (stays * within + _sum_into(shares * before, into)) + _sum_into(shares * after, into)
    # rows of clusters that others joined: means of their members' rows, too
    joining, others = mixed[:, :k], mixed[:, k:]
    is_target = (target[:, :, None] == rows[:, None]).to(mass.dtype)  # B k K
    change = (joining - is_target @ others) * shares[:, :, None]
    return torch.baddbmm(others, is_target.transpose(1, 2), change), within, mass


def _sum_into(values: Tensor, into: Tensor) -> Tensor:
    """Sums of values (B k) over the tokens with the same target, B n; into: B k n, one-hot."""
    return (values[:, None] @ into)[:, 0]


def _assignment(joined: Tensor, targets: Tensor, order: Tensor, rounds: int, *, protected: int) -> Assignment:
    """From the tokens that joined (B r) and those that they joined (B r), both as positions in `order` (B n)."""
    n, r = order.shape[1], joined.shape[1]
    index = torch.arange(n, device=order.device)
    root = index.expand_as(order).scatter(1, joined, targets)
    for _ in range((rounds - 1).bit_length()):  # a target may join another in a later round
        root = root.gather(1, root)
    if not portable.exporting():
        root = torch.empty_like(order).scatter_(1, order, order.gather(1, root))
        return Assignment.of_roots(root, n - r, protected=protected)
    roots, joined = order.gather(1, root.gather(1, joined)), order.gather(1, joined)
    stays = torch.ones_like(order).scatter(1, joined, 0)
    number = stays.cumsum(1) + (protected - 1)
    slots = number.gather(1, index.expand_as(order).scatter(1, joined, roots))
    kept = (stays * (n - index)).topk(n - r, dim=1).indices
    tokens = portable.prepend_protected(torch.cat([kept, joined], dim=1) + protected, protected)
    split = portable.SlotSplit(tokens, number.gather(1, roots))
    return Assignment(portable.prepend_protected(slots, protected), n - r + protected, split=split)
