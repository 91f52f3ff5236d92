"""Clustering by Ward's cost of more than 256 tokens per image, by many programs: Triton version of `core.clustering`.

Distances are computed from the centers of clusters in tiles, and never stored. A round takes three launches: a search
for the cheapest partners, a program per image that lets the cheapest tokens join theirs, and new centers. From the
second round on, few rows are searched: tokens that others joined, and those whose partner was changed. The tokens that
others joined also offer themselves to all the others.

Costs are not negative, so their bits are ordered as they are: a cost and a partner are packed in one int64, and the
lowest of many programs is an atomic minimum, which depends on no order.

Axes: B images, n unprotected tokens, C channels, k tokens that join in a round.
"""

import triton
import triton.language as tl

from .clustering import join_costs

_NOBODY: tl.constexpr = tl.constexpr(1 << 20)  # above every token
_INF_BITS: tl.constexpr = tl.constexpr(0x7F800000)  # of float32's inf


@triton.jit
def _pack(cost, token):
    """A cost and a token in one number, ordered by cost, then by token."""
    return (cost.to(tl.int32, bitcast=True).to(tl.int64) << 32) + token


@triton.jit
def search_kernel(
    centers, squares, mass, pairs, rows, counts, changed, channels, n, splits,
    FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """pairs (B n): the lowest cost of joining a token of larger weight, and that token, of the listed rows.

    rows (B n): the first counts (B) are searched; all in the FIRST round. Where changed (B n) is 1, a token is offered
    to the others, too. Programs of axis 1 share the columns.
    """
    image = tl.program_id(2).to(tl.int64)
    count = n if FIRST else tl.load(counts + image)
    first_line = tl.program_id(0) * ROWS
    if first_line >= count:
        return
    centers += image * n * channels
    squares += image * n
    mass += image * n
    pairs += image * n
    line = first_line + tl.arange(0, ROWS)
    is_line = line < count
    row = line
    offers = is_line
    if not FIRST:
        row = tl.load(rows + image * n + line, mask=is_line, other=0)
        offers = tl.load(changed + image * n + row, mask=is_line, other=0) > 0
    w = tl.load(mass + row, mask=is_line, other=0.0)
    square = tl.load(squares + row, mask=is_line, other=0.0)
    lowest = tl.full([ROWS], float("inf"), tl.float32)
    chosen = tl.zeros([ROWS], tl.int32)
    for first in range(tl.program_id(1) * COLUMNS, n, COLUMNS * splits):
        column = first + tl.arange(0, COLUMNS)
        is_column = column < n
        product = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, channels, CHUNK):
            channel = start + tl.arange(0, CHUNK)
            inside = channel[None, :] < channels
            a = tl.load(centers + row[:, None] * channels + channel[None, :], mask=is_line[:, None] & inside, other=0.0)
            b = tl.load(
                centers + column[:, None] * channels + channel[None, :], mask=is_column[:, None] & inside, other=0.0
            )
            product = tl.dot(a, tl.trans(b), product, input_precision=PRECISION)
        w_column = tl.load(mass + column, mask=is_column, other=0.0)
        square_column = tl.load(squares + column, mask=is_column, other=0.0)
        d = tl.maximum(square[:, None] + square_column[None, :] - 2.0 * product, 0.0)
        cost = join_costs(d, w[:, None], w_column[None, :], row[:, None], column[None, :])
        low, at = tl.min(cost, 1, return_indices=True)
        chosen = tl.where(low < lowest, first + at, chosen)
        lowest = tl.minimum(low, lowest)
        if not FIRST:
            offered = join_costs(d, w_column[None, :], w[:, None], column[None, :], row[:, None])
            offered = tl.where(offers[:, None] & (w_column > 0.0)[None, :], offered, float("inf"))
            low = tl.min(offered, 0)
            by = tl.min(tl.where(offered == low[None, :], row[:, None], _NOBODY), 0)
            tl.atomic_min(pairs + column, _pack(low, by), mask=is_column & (low < float("inf")), sem="relaxed")
    tl.atomic_min(pairs + row, _pack(lowest, chosen), mask=is_line & (lowest < float("inf")), sem="relaxed")


@triton.jit
def join_kernel(
    pairs, mass, root, joined, targets, merged_tokens, rows, counts, changed, slots, tokens, n, k, done, r, protected,
    FIRST: tl.constexpr, FINAL: tl.constexpr, N: tl.constexpr, HOPS: tl.constexpr, PROTECTED: tl.constexpr,
):  # fmt: skip
    """The k cheapest tokens join their partners: joined, targets (B r): who joins whom, from entry `done` on.

    root (B n): the token whose cluster each is part of. rows, counts, changed: what `search_kernel` is to search next.
    merged_tokens (B r): `joined`, numbered with protected tokens. slots (B N): after the FINAL round.
    """
    image = tl.program_id(0).to(tl.int64)
    pairs += image * n
    root += image * n
    changed += image * n
    token = tl.arange(0, N)
    valid = token < n
    pair = tl.load(pairs + token, mask=valid, other=0)
    alive = valid & (tl.load(mass + image * n + token, mask=valid, other=0.0) > 0.0)
    bits = tl.where(alive, (pair >> 32).to(tl.int32), _INF_BITS)
    mate = tl.where(alive, (pair & 0xFFFFFFFF).to(tl.int32), token)

    # 1. the k cheapest tokens, of equal ones the first: bisection over the bits of the k-th lowest cost
    low = tl.sum(tl.zeros([N], tl.int32), 0)
    high = low + _INF_BITS
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = tl.sum((bits <= middle).to(tl.int32), 0) >= k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    below, equal = bits < high, alive & (bits == high)
    room = k - tl.sum(below.to(tl.int32), 0)
    joins = below | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))

    # 2. a partner may join another: the last of the chain is where its members end
    parent = tl.where(joins, mate, token)
    for _ in tl.static_range(HOPS):
        parent = tl.gather(parent, parent, 0)
    own_root = token
    if not FIRST:
        own_root = tl.load(root + token, mask=valid, other=0)
    own_root = tl.gather(parent, own_root, 0)
    tl.store(root + token, own_root, mask=valid)
    position = done + tl.cumsum(joins.to(tl.int32), 0) - 1
    tl.store(joined + image * r + position, token, mask=joins)
    tl.store(targets + image * r + position, parent, mask=joins)
    tl.store(merged_tokens + image * r + position, protected + token, mask=joins)

    if FINAL:
        kept = valid & (own_root == token)
        slot = protected + tl.gather(tl.cumsum(kept.to(tl.int32), 0) - 1, own_root, 0)
        tl.store(slots + image * tokens + protected + token, slot.to(tl.int64), mask=valid)
        leading = tl.arange(0, PROTECTED)
        tl.store(slots + image * tokens + leading, leading.to(tl.int64), mask=leading < protected)
    else:
        # 3. rows to search: tokens that others joined, and those whose partner was changed
        tl.store(changed + token, tl.zeros([N], tl.int32), mask=valid)
        tl.debug_barrier()
        tl.store(changed + parent, tl.full([N], 1, tl.int32), mask=joins)
        tl.debug_barrier()
        is_changed = tl.load(changed + token, mask=valid, other=0) > 0
        touched = tl.gather((joins | is_changed).to(tl.int32), mate, 0) > 0
        stale = alive & (joins == 0) & (is_changed | touched)
        tl.store(rows + image * n + tl.cumsum(stale.to(tl.int32), 0) - 1, token, mask=stale)
        tl.store(counts + image, tl.sum(stale.to(tl.int32), 0))
        tl.store(pairs + token, tl.zeros([N], tl.int64) + (_INF_BITS << 32), mask=stale)


@triton.jit
def centers_kernel(
    centers, squares, mass, joined, targets, channels, n, k, done, r, K: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """centers (B n C), squares (B n): their squared norms, and mass (B n) of a token that others joined.

    A program per joining token; the first of those that joined the same one works for all of them.
    """
    image = tl.program_id(1).to(tl.int64)
    centers += image * n * channels
    mass += image * n
    joined += image * r + done
    targets += image * r + done
    mine = tl.program_id(0)
    target = tl.load(targets + mine)
    member = tl.arange(0, K)
    same = tl.load(targets + member, mask=member < k, other=-1) == target
    if tl.min(tl.where(same, member, K), 0) < mine:
        return
    channel = tl.arange(0, CHANNELS)
    inside = channel < channels
    total = tl.load(mass + target)
    center = total * tl.load(centers + target * channels + channel, mask=inside, other=0.0).to(tl.float32)
    each = mine
    while each < K:
        token = tl.load(joined + each)
        w = tl.load(mass + token)
        center += w * tl.load(centers + token * channels + channel, mask=inside, other=0.0).to(tl.float32)
        total += w
        tl.store(mass + token, 0.0)
        each = tl.min(tl.where(same & (member > each), member, K), 0)
    center = (center / total).to(centers.dtype.element_ty)
    tl.store(centers + target * channels + channel, center, mask=inside)
    center = center.to(tl.float32)
    tl.store(squares + image * n + target, tl.sum(center * center, 0))
    tl.store(mass + target, total)
