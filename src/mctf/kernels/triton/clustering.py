"""Clustering by Ward's cost: Triton version of `core.clustering`.

The first launch computes the squared distances of all pairs of tokens, in tiles. A round takes two: many programs find
the cheapest partner of each token; one program per image joins the cheapest tokens to theirs and updates the rows and
columns of the tokens that others joined. Threads exchange numbers through memory: a store, a barrier, a load in another
layout.

Axes: B images, N tokens, n of them unprotected, C channels, k tokens that join in a round.
"""

import triton
import triton.language as tl

_PRECISION: tl.constexpr = tl.constexpr("tf32x3")  # float32 by three products on the tensor cores


@triton.jit
def distances_kernel(
    x, norms, distances, tokens, channels, n, pitch, protected, x_b, x_n,
    A: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """distances (B n pitch): 2 - 2 cos of a tile of pairs, and of the same pairs the other way round."""
    image = tl.program_id(1).to(tl.int64)
    # the tile's row and column: tiles on and below the diagonal, numbered row by row
    row = 0
    first = 0
    tile = tl.program_id(0)
    while first + row + 1 <= tile:
        first += row + 1
        row += 1
    column = tile - first
    index = tl.arange(0, A)
    i, j = row * A + index, column * A + index
    is_i, is_j = i < n, j < n
    x += image * x_b + protected * x_n
    norms += image * tokens + protected
    product = tl.zeros([A, A], tl.float32)
    for start in range(0, channels, CHUNK):
        channel = start + tl.arange(0, CHUNK)
        inside = channel[None, :] < channels
        xi = tl.load(x + i[:, None] * x_n + channel[None, :], mask=is_i[:, None] & inside, other=0.0)
        xj = tl.load(x + j[:, None] * x_n + channel[None, :], mask=is_j[:, None] & inside, other=0.0)
        product = tl.dot(xi, tl.trans(xj), product, input_precision=PRECISION)
    inverse_i = 1.0 / tl.maximum(tl.load(norms + i, mask=is_i, other=1.0), 1e-30)
    inverse_j = 1.0 / tl.maximum(tl.load(norms + j, mask=is_j, other=1.0), 1e-30)
    squared = tl.maximum(2.0 - 2.0 * product * inverse_i[:, None] * inverse_j[None, :], 0.0)
    distances += image * n * pitch
    keep = is_i[:, None] & is_j[None, :]
    tl.store(distances + i[:, None] * pitch + j[None, :], squared, mask=keep)
    if row != column:
        tl.store(distances + j[:, None] * pitch + i[None, :], tl.trans(squared), mask=is_j[:, None] & is_i[None, :])


@triton.jit
def partners_kernel(
    distances, mass, best, partner, n, pitch, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """best, partner (B n): the lowest cost of each token, of joining one of larger weight, and that token.

    Of equal weights the earlier token counts as larger, of equal costs the first partner is taken. A token that has
    joined another has weight 0 and the cost inf.
    """
    image = tl.program_id(1).to(tl.int64)
    distances += image * n * pitch
    mass += image * n
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = token < n
    w = tl.load(mass + token, mask=valid, other=0.0)
    lowest = tl.full([ROWS], float("inf"), tl.float32)
    chosen = tl.zeros([ROWS], tl.int32)
    for first in range(0, n, COLUMNS):
        other = first + tl.arange(0, COLUMNS)
        is_other = other < n
        w_other = tl.load(mass + other, mask=is_other, other=0.0)
        d = tl.load(
            distances + token[:, None] * pitch + other[None, :], mask=valid[:, None] & is_other[None, :], other=0.0
        )
        cost = _costs(d, w[:, None], w_other[None, :], token[:, None], other[None, :])
        low = tl.min(cost, 1)
        at = tl.min(tl.where(cost == low[:, None], other[None, :], 1 << 20), 1)
        chosen = tl.where(low < lowest, at, chosen)
        lowest = tl.minimum(low, lowest)
    tl.store(best + image * n + token, tl.where(w > 0.0, lowest, float("inf")), mask=valid)
    tl.store(partner + image * n + token, chosen, mask=valid)


@triton.jit
def _costs(d, mine, theirs, token, other):
    """Cost of joining `other`; inf unless its weight is larger."""
    larger = (theirs > mine) | ((theirs == mine) & (other < token))
    return tl.where(larger, d * (mine * theirs) / (mine + theirs), float("inf"))


@triton.jit
def join_kernel(
    distances, mass, best, partner, root, parent, joined, mixed, n, pitch, k,
    UPDATE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HOPS: tl.constexpr,
):  # fmt: skip
    """The k cheapest tokens join their partners: mass and root (B n) and, to UPDATE, distances are those afterwards.

    parent (B n), joined (B K) and mixed (B K N): scratch. N, K: powers of two, at least n and k.
    """
    image = tl.program_id(0).to(tl.int64)
    distances += image * n * pitch
    mass += image * n
    best += image * n
    partner += image * n
    root += image * n
    parent += image * n
    joined += image * K
    mixed += image * K * N
    token = tl.arange(0, N)
    valid = token < n
    member = tl.arange(0, K)
    is_member = member < k

    # 1. the k cheapest tokens: costs, which are not negative, are ordered as their bits are
    cost = tl.load(best + token, mask=valid, other=float("inf"))
    key = (cost.to(tl.int32, bitcast=True).to(tl.int64) << 32) + token
    ordered = tl.sort(key)
    tl.store(joined + token, (ordered & 0xFFFF).to(tl.int32), mask=token < k)
    joins = key <= tl.sum(tl.where(token == k - 1, ordered, 0), 0)
    tl.store(parent + token, token, mask=valid)
    tl.debug_barrier()

    # 2. a partner may join another: the last of the chain is where its members end
    j = tl.load(joined + member, mask=is_member, other=0)
    target = tl.load(partner + j)
    tl.store(parent + j, target, mask=is_member)
    for _ in tl.static_range(HOPS):
        tl.debug_barrier()
        target = tl.load(parent + target, mask=is_member, other=0)
        tl.debug_barrier()
        tl.store(parent + j, target, mask=is_member)
    tl.debug_barrier()
    own_root = tl.load(root + token, mask=valid, other=0)
    tl.store(root + token, tl.load(parent + own_root, mask=valid, other=0), mask=valid)

    # 3. weights
    w = tl.load(mass + token, mask=valid, other=0.0)
    w_j = tl.where(is_member, tl.load(mass + j), 0.0)
    w_t = tl.load(mass + target, mask=is_member, other=0.0)
    same = (target[:, None] == target[None, :]) & is_member[None, :] & is_member[:, None]
    w_total = w_t + tl.sum(tl.where(same, w_j[None, :], 0.0), 1)
    tl.debug_barrier()
    tl.store(mass + token, tl.where(joins, 0.0, w), mask=valid)
    tl.debug_barrier()
    tl.store(mass + target, w_total, mask=is_member)  # several members store the same number

    # 4. distances of the tokens that others joined: means over members, less half of the means within
    if UPDATE:
        w_total = tl.where(is_member, w_total, 1.0)
        share_j, share_t = w_j / w_total, w_t / w_total
        keep = is_member[:, None] & valid[None, :]
        d_j = tl.load(distances + j[:, None] * pitch + token[None, :], mask=keep, other=0.0)
        d_t = tl.load(distances + target[:, None] * pitch + token[None, :], mask=keep, other=0.0)
        mix = tl.where(same, share_j[None, :], 0.0)
        rows = share_t[:, None] * d_t + tl.dot(mix, d_j, input_precision=_PRECISION)
        line = mixed + member[:, None] * N
        tl.store(line + token[None, :], rows)
        tl.debug_barrier()
        at_j = tl.load(line + j[None, :])
        at_t = tl.load(line + target[None, :], mask=is_member[None, :], other=0.0)
        among = share_t[None, :] * at_t + tl.dot(at_j, tl.trans(mix), input_precision=_PRECISION)
        own = tl.sum(tl.where(member[:, None] == member[None, :], among, 0.0), 1)
        updated = tl.maximum(rows - 0.5 * own[:, None], 0.0)
        tl.store(distances + target[:, None] * pitch + token[None, :], updated, mask=keep)
        tl.store(distances + token[None, :] * pitch + target[:, None], updated, mask=keep)
        tl.debug_barrier()
        between = tl.maximum(among - 0.5 * own[:, None] - 0.5 * own[None, :], 0.0)
        keep = is_member[:, None] & is_member[None, :]
        tl.store(distances + target[:, None] * pitch + target[None, :], between, mask=keep)


@triton.jit
def slots_kernel(
    root, parent, slots, order, start, tokens, n, r, protected,
    N: tl.constexpr, PROTECTED: tl.constexpr,
):  # fmt: skip
    """slots (B N); order (B N): tokens sorted by slot; start (B M+1): where each slot begins in `order`.

    The tokens that stay have slots in their old order, the others the slot of their root. parent (B n): scratch.
    """
    image = tl.program_id(0).to(tl.int64)
    parent += image * n
    token = tl.arange(0, N)
    valid = token < n
    own_root = tl.load(root + image * n + token, mask=valid, other=0)
    kept = valid & (own_root == token)
    tl.store(parent + token, protected + tl.cumsum(kept.to(tl.int32), 0) - 1, mask=valid)
    tl.debug_barrier()
    slot = tl.load(parent + own_root, mask=valid, other=0)
    slots += image * tokens
    order += image * tokens
    start += image * (tokens - r + 1)
    tl.store(slots + protected + token, slot.to(tl.int64), mask=valid)
    ordered = tl.sort(tl.where(valid, slot * N + token, 1 << 30))
    tl.store(order + protected + token, protected + ordered % N, mask=valid)
    tl.debug_barrier()
    tl.store(parent + token, ordered // N, mask=valid)
    tl.debug_barrier()
    before = tl.load(parent + token - 1, mask=valid & (token > 0), other=-1)
    tl.store(start + ordered // N, protected + token, mask=valid & (ordered // N != before))
    leading = tl.arange(0, PROTECTED)
    tl.store(slots + leading, leading.to(tl.int64), mask=leading < protected)
    tl.store(order + leading, leading, mask=leading < protected)
    tl.store(start + leading, leading, mask=leading < protected)
    tl.store(start + tokens - r, tokens)
