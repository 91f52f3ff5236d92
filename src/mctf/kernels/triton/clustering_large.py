"""Clustering by Ward's cost of more than 256 tokens per image, by many programs: Triton version of `core.clustering`.

Distances are computed from the centers of clusters in tiles, and never stored. A round takes three launches: a search
for the cheapest partners, a program per image that lets the cheapest tokens join theirs, and new centers. From the
second round on, few rows are searched: tokens that others joined, and those whose partner was changed. The tokens that
others joined also offer themselves to all the others.

Within a tile, pairs of a cost and a partner are those of `clustering.py`. The lowest of many programs is an atomic
minimum of pairs with 64 bits, which depends on no order.

Axes: B images, n unprotected tokens, C channels, k tokens that join in a round.
"""

import triton
import triton.language as tl

from .clustering import no_pair, pack, products, tile_on_or_above_diagonal, tile_products, token_of, ward_costs

_INF_BITS: tl.constexpr = tl.constexpr(0x7F800000)  # of float32's inf


@triton.jit
def _is_larger(inverse, token, inverse_other, other):
    """Whether `other` has the larger weight, both given as 1 / weight; of equal weights the earlier is larger."""
    return (inverse_other < inverse) | ((inverse_other == inverse) & (other < token))


@triton.jit
def _keep_lowest(pairs, token, pair, partner, mask, WIDE: tl.constexpr):
    """Lower pairs (B n) of tokens to those of a tile, with the partner's number in place of that in the tile."""
    if WIDE:
        cost = pair >> 32
    else:
        cost = (pair & -256).to(tl.int64)
    tl.atomic_min(pairs + token, (cost << 32) | partner, mask=mask & (cost < _INF_BITS), sem="relaxed")


@triton.jit
def first_search_kernel(
    centers, squares, mass, pairs, channels, n,
    WIDE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """pairs (B n): the lowest cost of joining a token of larger weight, and that token.

    A program per tile on or above the diagonal searches for its rows and for its columns.
    """
    image = tl.program_id(1).to(tl.int64)
    tile_row, tile_column = tile_on_or_above_diagonal(tl.program_id(0))
    line = tl.arange(0, TILE)
    row, column = tile_row * TILE + line, tile_column * TILE + line
    is_row, is_column = row < n, column < n
    centers += image * n * channels
    squares += image * n
    mass += image * n
    pairs += image * n
    on_diagonal = tile_row == tile_column
    product = tile_products(centers, row, column, on_diagonal, n, channels, channels, TILE, CHUNK, PRECISION)
    square = tl.load(squares + row, mask=is_row, other=0.0)
    square_column = tl.load(squares + column, mask=is_column, other=0.0)
    d = tl.maximum(square[:, None] + square_column[None, :] - 2.0 * product, 0.0)
    inverse = 1.0 / tl.load(mass + row, mask=is_row, other=0.0)
    inverse_column = 1.0 / tl.load(mass + column, mask=is_column, other=0.0)
    cost = ward_costs(d, inverse[:, None], inverse_column[None, :])
    joins_column = _is_larger(inverse[:, None], row[:, None], inverse_column[None, :], column[None, :])
    nobody = no_pair(WIDE)
    own = tl.min(tl.where(joins_column, pack(cost, line[None, :], WIDE), nobody), 1)
    _keep_lowest(pairs, row, own, tile_column * TILE + token_of(own), is_row, WIDE)
    if on_diagonal == 0:
        own = tl.min(tl.where(joins_column, nobody, pack(cost, line[:, None], WIDE)), 0)
        _keep_lowest(pairs, column, own, tile_row * TILE + token_of(own), is_column, WIDE)


@triton.jit
def search_kernel(
    centers, squares, mass, pairs, rows, counts, changed, channels, n, splits,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """pairs (B n): the lowest cost of joining a token of larger weight, and that token, of the listed rows.

    rows (B n): the first counts (B) are searched. Where changed (B n) is 1, a token is offered to the others, too.
    Programs of axis 1 share the columns.
    """
    image = tl.program_id(2).to(tl.int64)
    count = tl.load(counts + image)
    first_line = tl.program_id(0) * ROWS
    if first_line >= count:
        return
    centers += image * n * channels
    squares += image * n
    mass += image * n
    pairs += image * n
    rows += image * n + first_line
    line = tl.arange(0, ROWS)
    is_line = first_line + line < count
    row = tl.load(rows + line, mask=is_line, other=0)
    offers = tl.load(changed + image * n + row, mask=is_line, other=0) > 0
    inverse = 1.0 / tl.load(mass + row, mask=is_line, other=0.0)
    square = tl.load(squares + row, mask=is_line, other=0.0)
    nobody = no_pair(WIDE)
    for first in range(tl.program_id(1) * COLUMNS, n, COLUMNS * splits):
        place = tl.arange(0, COLUMNS)
        column = first + place
        is_column = column < n
        product = products(centers, row, is_line, column, is_column, channels, channels, CHUNK, PRECISION)
        inverse_column = 1.0 / tl.load(mass + column, mask=is_column, other=0.0)
        square_column = tl.load(squares + column, mask=is_column, other=0.0)
        d = tl.maximum(square[:, None] + square_column[None, :] - 2.0 * product, 0.0)
        cost = ward_costs(d, inverse[:, None], inverse_column[None, :])
        joins_column = _is_larger(inverse[:, None], row[:, None], inverse_column[None, :], column[None, :])
        own = tl.min(tl.where(joins_column, pack(cost, place[None, :], WIDE), nobody), 1)
        _keep_lowest(pairs, row, own, first + token_of(own), is_line, WIDE)
        is_other = (row[:, None] != column[None, :]) & (inverse_column < float("inf"))[None, :]
        may_join = offers[:, None] & (joins_column == 0) & is_other
        own = tl.min(tl.where(may_join, pack(cost, line[:, None], WIDE), nobody), 0)
        by = tl.load(rows + token_of(own), mask=first_line + token_of(own) < count, other=0)
        _keep_lowest(pairs, column, own, by, is_column, WIDE)


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
