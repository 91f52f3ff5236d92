"""Clustering and pooling on a CPU, compiled by Numba where it is installed (`mctf[cpu]`).

The plain versions are `core.clustering` and `Assignment.pool`. They take some fifty operations per round and thirty per
pooling, whose launches cost more than their work on small batches. A round changes only what it has to here: a token's
partner is searched again only where the old one was changed, as in the Triton version.

Axes: B images, N tokens, n of them unprotected, M slots, C channels.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from ..core.assignment import Assignment
from ..core.matching import unit_rows

_PER_THREAD = 1 << 18  # numbers to compare or to add for which another thread pays: 7 images of 196 tokens
_REASSOCIATED = {"nsz", "contract", "reassoc"}  # sums are vectorized only like this
_WITHOUT_NAN = _REASSOCIATED | {"nnan"}  # minima as well, of numbers alone
_TINY = 1e-30


def cluster(x: Tensor, weights: Tensor, r: int, *, protected: int, rounds: int) -> Assignment:
    """`core.clustering.cluster` of tokens x (B N C) by the squared distances of their directions; weights: B N."""
    batch, tokens = weights.shape
    unit = unit_rows(x.detach()[:, protected:])
    cosines = unit @ unit.transpose(1, 2)
    mass = weights[:, protected:].to(cosines.dtype, copy=True)
    slots, order = np.empty((batch, tokens), np.int64), np.empty((batch, tokens), np.int32)
    start = np.zeros((batch, tokens - r + 1), np.int32)
    arrays = (cosines.numpy(), mass.numpy(), slots, order, start)
    _over_images(_cluster_images, arrays, (r, rounds, protected), work=cosines.numel())
    return Assignment(torch.from_numpy(slots), tokens - r, torch.from_numpy(order), torch.from_numpy(start))


def pool(x: Tensor, weights: Tensor, assignment: Assignment, *, keep_norm: bool = False) -> Tensor:
    """Weighted mean of the tokens (B N C) in each slot, B M C; 0 where all weights (B N) are 0.

    keep_norm: with the weighted mean of the members' norms.
    """
    batch, _, channels = x.shape
    mean = x.new_empty((batch, assignment.count, channels))
    order, start = assignment.members()
    arrays = tuple(each.contiguous().numpy() for each in (x.detach(), weights.detach(), order, start, mean))
    _over_images(_pool_images, arrays, (keep_norm,), work=x.numel())
    return mean


def _over_images(function: Callable[..., None], arrays: tuple[Any, ...], others: tuple[Any, ...], *, work: int) -> None:
    """Run a compiled function on all images, in threads where there is enough work."""
    threads = min(torch.get_num_threads(), len(arrays[0]), work // _PER_THREAD)
    if threads < 2:
        function(*arrays, *others)
        return
    parts = zip(*(np.array_split(each, threads) for each in arrays), strict=True)
    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(lambda part: function(*part, *others), parts))


def _compiled(**options: Any) -> Callable[[Callable], Callable]:
    """numba.njit whose machine code is kept for later processes, where there is a folder for it."""

    def compiled(function: Callable) -> Callable:
        try:
            return numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
        except RuntimeError:  # no folder that may be written
            return numba.njit(nogil=True, error_model="numpy", **options)(function)

    return compiled


@_compiled(fastmath=_WITHOUT_NAN)
def _costs(row: Any, w: Any, token: int, far: Any, costs: Any) -> Any:
    """Ward's costs (n) of joining each token of larger weight, divided by the token's weight; returns the lowest.

    Of equal weights the earlier token counts as larger.
    """
    mine, low = w[token], far
    for other in range(token):
        cost = row[other] * (w[other] / (mine + w[other]))
        cost = cost if w[other] >= mine else far
        costs[other] = cost
        low = min(low, cost)
    costs[token] = far
    for other in range(token + 1, len(w)):
        cost = row[other] * (w[other] / (mine + w[other]))
        cost = cost if w[other] > mine else far
        costs[other] = cost
        low = min(low, cost)
    return low


@_compiled(fastmath=_WITHOUT_NAN)
def _join(d: Any, target: int, token: int, p: Any, q: Any, row: Any) -> None:
    """Distances (n n) once `target` is p of itself and q of `token`: p d_t + q d_j - p q d_tj (Lance and Williams)."""
    within = p * q * d[target, token]
    zero = within * 0
    for other in range(len(row)):
        row[other] = max(p * d[target, other] + q * d[token, other] - within, zero)
    row[target] = zero
    for other in range(len(row)):
        d[target, other] = row[other]
        d[other, target] = row[other]


@_compiled()
def _run_rounds(d: Any, w: Any, r: int, rounds: int, root: Any) -> None:
    """root (n): the token that each token has become part of. d (n n), cosines, and w (n) are overwritten."""
    n, zero, farthest, far = len(w), d.dtype.type(0), d.dtype.type(4), d.dtype.type(3e38)
    costs, row, best = np.empty(n, d.dtype), np.empty(n, d.dtype), np.empty(n, d.dtype)
    partner, joining = np.empty(n, np.int64), np.empty(n, np.int64)
    joins, changed, stale = np.empty(n, np.bool_), np.empty(n, np.bool_), np.empty(n, np.bool_)
    for token in range(n):
        root[token], stale[token] = token, True
        for other in range(n):
            squared = 2 - 2 * d[token, other]
            d[token, other] = squared if squared > zero else zero if squared <= zero else farthest  # of NaN
    for number in range(rounds):
        k = (r + rounds - 1 - number) // rounds  # r in equal parts, the remainder in the first rounds

        # 1. the cheapest partner of each token: of equal costs the first one
        for token in range(n):
            joins[token], changed[token] = False, False
            if stale[token]:
                low = _costs(d[token], w, token, far, costs)
                first = 0
                while first < n - 1 and costs[first] != low:
                    first += 1
                partner[token] = first
                best[token] = low * w[token] if low < far else far

        # 2. the k cheapest tokens join theirs; a partner may join another, and the last of the chain takes all
        for place in range(k):
            cheapest = -1
            for token in range(n):
                if not joins[token] and (cheapest < 0 or best[token] < best[cheapest]):
                    cheapest = token
            joins[cheapest], joining[place] = True, cheapest
        for place in range(k):
            token = joining[place]
            while joins[partner[token]]:
                partner[token] = partner[partner[token]]
        for token in range(n):
            if joins[root[token]]:
                root[token] = partner[root[token]]
        if number + 1 == rounds:
            return

        # 3. weights and distances of the tokens that others joined
        for place in range(k):
            token = joining[place]
            target = partner[token]
            changed[target] = True
            total = w[target] + w[token]
            _join(d, target, token, w[target] / total, w[token] / total, row)
            w[target], w[token], best[token] = total, 0, far

        # 4. the other tokens compare their partner with these; those whose partner was changed search again
        for token in range(n):
            old = partner[token]
            stale[token] = w[token] > 0 and (changed[token] or changed[old] or joins[old])
            if stale[token] or w[token] == 0:
                continue
            for place in range(k):
                target = partner[joining[place]]
                if w[target] > w[token] or (w[target] == w[token] and target < token):
                    cost = d[token, target] * (w[target] / (w[token] + w[target])) * w[token]
                    if cost < best[token] or (cost == best[token] and target < partner[token]):
                        best[token], partner[token] = cost, target


@_compiled()
def _cluster_images(d: Any, w: Any, slots: Any, order: Any, start: Any, r: int, rounds: int, protected: int) -> None:
    """slots (B N), tokens sorted by slot (B N), and where each slot begins there (B M+1, filled with 0)."""
    batch, n = w.shape
    root = np.empty(n, np.int64)
    for image in range(batch):
        _run_rounds(d[image], w[image], r, min(r, rounds), root)
        slot, begin = slots[image], start[image]
        for token in range(protected):
            slot[token] = token
        count = protected
        for token in range(n):
            if root[token] == token:
                slot[protected + token] = count
                count += 1
        for token in range(n):
            slot[protected + token] = slot[protected + root[token]]
        for token in range(protected + n):  # counts, then sums of counts: where each slot ends
            begin[slot[token]] += 1
        for each in range(1, count + 1):
            begin[each] += begin[each - 1]
        for token in range(protected + n - 1, -1, -1):  # from the end, each slot fills towards its beginning
            begin[slot[token]] -= 1
            order[image, begin[slot[token]]] = token


@_compiled(fastmath=_REASSOCIATED)
def _pool_images(x: Any, w: Any, order: Any, start: Any, mean: Any, keep_norm: bool) -> None:
    """mean (B M C) of the tokens (B N C) of each slot; order (B N): tokens sorted by slot, start (B M+1)."""
    batch, count, channels = mean.shape
    zero = x.dtype.type(0)
    for image in range(batch):
        for slot in range(count):
            first, last = start[image, slot], start[image, slot + 1]
            total, norm, square = zero, zero, zero
            for place in range(first, last):
                total += w[image, order[image, place]]
            for channel in range(channels):
                mean[image, slot, channel] = zero
            if total <= zero:
                continue
            for place in range(first, last):
                token = order[image, place]
                share, own = w[image, token] / total, zero
                for channel in range(channels):
                    mean[image, slot, channel] += share * x[image, token, channel]
                    own += x[image, token, channel] * x[image, token, channel]
                norm += share * np.sqrt(own)
            if keep_norm and last > first + 1:
                for channel in range(channels):
                    square += mean[image, slot, channel] * mean[image, slot, channel]
                factor = norm / max(np.sqrt(square), x.dtype.type(_TINY))
                for channel in range(channels):
                    mean[image, slot, channel] *= factor
