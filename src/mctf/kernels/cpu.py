"""Clustering and pooling on a CPU, compiled by Numba where it is installed (`mctf[cpu]`).

The plain versions are `core.clustering` and `Assignment.pool`. They take some fifty operations per round and thirty per
pooling, whose launches cost more than their work on small batches. A round changes the rows of candidates alone, as
in the Triton version.

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
from ..core.clustering import num_candidates
from ..core.matching import unit_rows

_PER_THREAD = 1 << 18  # numbers to compare or to add for which another thread pays: 7 images of 196 tokens
_REASSOCIATED = {"nsz", "contract", "reassoc"}  # sums are vectorized only like this
_WITHOUT_NAN = _REASSOCIATED | {"nnan"}  # minima as well, of numbers alone
_TINY = 1e-30


def cluster(x: Tensor, weights: Tensor, r: int, *, protected: int, rounds: int, candidates: float) -> Assignment:
    """`core.clustering.cluster` of tokens x (B N C) by the squared distances of their directions; weights: B N."""
    batch, tokens = weights.shape
    unit = unit_rows(x.detach()[:, protected:])
    cosines = unit @ unit.transpose(1, 2)
    mass = weights[:, protected:].to(cosines.dtype, copy=True)
    slots, order = np.empty((batch, tokens), np.int64), np.empty((batch, tokens), np.int32)
    start = np.zeros((batch, tokens - r + 1), np.int32)
    arrays = (cosines.numpy(), mass.numpy(), slots, order, start)
    count = num_candidates(r, tokens - protected, candidates)
    _over_images(_cluster_images, arrays, (r, rounds, count, protected), work=cosines.numel())
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
def _lowest_cost(row: Any, w: Any, token: int, far: Any) -> Any:
    """The lowest of Ward's costs of joining a token of larger weight, divided by the own weight.

    Of equal weights the earlier token counts as larger. row (n): squared distances.
    """
    mine, low = w[token], far
    for other in range(token):
        cost = row[other] * (w[other] / (mine + w[other]))
        low = min(low, cost if w[other] >= mine else far)
    for other in range(token + 1, len(w)):
        cost = row[other] * (w[other] / (mine + w[other]))
        low = min(low, cost if w[other] > mine else far)
    return low


@_compiled()
def _partner(row: Any, w: Any, token: int, leaves: Any, far: Any) -> int:
    """The cheapest token of larger weight that stays; of equal costs the first."""
    mine, low, partner = w[token], far, -1
    for other in range(len(w)):
        if leaves[other] or not (w[other] > mine or (w[other] == mine and other < token)):
            continue
        cost = row[other] * (w[other] / (mine + w[other]))
        if partner < 0 or cost < low:
            low, partner = cost, other
    return partner


@_compiled()
def _run_rounds(d: Any, w: Any, r: int, rounds: int, candidates: int, root: Any) -> None:
    """root (n): the token that each token has become part of. d (n n), cosines, and w (n) are overwritten."""
    n, zero, farthest, far = len(w), d.dtype.type(0), d.dtype.type(4), d.dtype.type(3e38)
    best, parent, leaves = np.empty(n, d.dtype), np.arange(n), np.zeros(n, np.bool_)
    for token in range(n):
        for other in range(n):
            squared = 2 - 2 * d[token, other]
            d[token, other] = squared if squared > zero else zero if squared <= zero else farthest  # of NaN
        low = _lowest_cost(d[token], w, token, far)
        best[token] = low * w[token] if low < far else far
    rows = np.argsort(best, kind="mergesort")[:candidates]
    left, begin = r, 0
    for number in range(rounds):
        k = max(1, 2 * left // (rounds - number + 1))
        left -= k

        # 1. the k cheapest candidates leave, each for the cheapest token that stays
        if number > 0:
            for place in range(begin, candidates):
                token = rows[place]
                low = _lowest_cost(d[token], w, token, far)
                best[token] = low * w[token] if low < far else far
            rest = rows[begin:candidates]
            rows[begin:candidates] = rest[np.argsort(best[rest], kind="mergesort")]
        end = begin + k
        for place in range(begin, end):
            leaves[rows[place]] = True
        for place in range(begin, end):
            parent[rows[place]] = _partner(d[rows[place]], w, rows[place], leaves, far)
        if number + 1 == rounds:
            break

        # 2. weights, and distances of the candidates that are left (Lance and Williams)
        for place in range(begin, end):
            token = rows[place]
            target = parent[token]
            total = w[target] + w[token]
            p, q = w[target] / total, w[token] / total
            within = p * q * d[token, target]
            w[target], w[token] = total, zero
            for other in range(n):
                d[target, other] = max(p * d[target, other] + q * d[token, other] - within, zero)
            for later in range(place + 1, candidates):
                other = rows[later]
                d[other, target] = max(p * d[other, target] + q * d[other, token] - within, zero)
            d[target, target] = zero
        begin = end

    for token in range(n):
        root[token] = token
        while leaves[root[token]]:  # a target may join another in a later round
            root[token] = parent[root[token]]


@_compiled()
def _cluster_images(
    d: Any, w: Any, slots: Any, order: Any, start: Any, r: int, rounds: int, candidates: int, protected: int
) -> None:
    """slots (B N), tokens sorted by slot (B N), and where each slot begins there (B M+1, filled with 0)."""
    batch, n = w.shape
    root = np.empty(n, np.int64)
    for image in range(batch):
        _run_rounds(d[image], w[image], r, min(r, rounds), candidates, root)
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
