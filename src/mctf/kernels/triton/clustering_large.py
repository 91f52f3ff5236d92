"""Clustering by Ward's cost of more than 256 tokens per image, by many programs: Triton version of `core.clustering`.

Distances are computed from the centers of clusters in tiles, and never stored. A round takes four launches: a search
for the cheapest partner of every token, later of the candidates that remain; a program per image that selects which
tokens join; a second search for those whose partner joins another token; and new centers.

Within a tile, pairs of a cost and a partner are those of `clustering.py`. The lowest of many programs is an atomic
minimum of pairs with 64 bits, which depends on no order.

Axes: B images, n unprotected tokens, C channels, K candidates, k tokens that join in a round.
"""

import triton
import triton.language as tl

from .clustering import (
    is_larger,
    no_pair,
    pack,
    products,
    tile_on_or_above_diagonal,
    tile_products,
    token_of,
    ward_costs,
)

_INF_BITS: tl.constexpr = tl.constexpr(0x7F800000)  # of float32's inf
_SEARCHES: tl.constexpr = tl.constexpr(20)  # quarters of 31 bits, and the last few numbers one by one


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
    w = tl.load(mass + row, mask=is_row, other=0.0)
    w_column = tl.load(mass + column, mask=is_column, other=0.0)
    cost = ward_costs(d, (1.0 / w)[:, None], (1.0 / w_column)[None, :])
    nobody = no_pair(WIDE)
    if on_diagonal:
        larger = is_larger(w[:, None], row[:, None], w_column[None, :], column[None, :])
        own = tl.min(tl.where(larger, pack(cost, line[None, :], WIDE), nobody), 1)
        _keep_lowest(pairs, row, own, tile_column * TILE + token_of(own), is_row, WIDE)
    else:  # every row is earlier than every column
        larger = w_column[None, :] > w[:, None]
        own = tl.min(tl.where(larger, pack(cost, line[None, :], WIDE), nobody), 1)
        _keep_lowest(pairs, row, own, tile_column * TILE + token_of(own), is_row, WIDE)
        own = tl.min(tl.where(larger, nobody, pack(cost, line[:, None], WIDE)), 0)
        _keep_lowest(pairs, column, own, tile_row * TILE + token_of(own), is_column, WIDE)


@triton.jit
def search_kernel(
    centers, squares, mass, staying, pairs, rows, counts, channels, n, splits,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """pairs (B n): the lowest cost of joining a token of larger weight that stays, and that token, of the listed rows.

    rows (B n): the first counts (B) are searched. staying: `mass`, 0 of the tokens that nothing may join; both B n.
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
    staying += image * n
    pairs += image * n
    rows += image * n + first_line
    line = tl.arange(0, ROWS)
    is_line = first_line + line < count
    row = tl.load(rows + line, mask=is_line, other=0)
    w = tl.load(mass + row, mask=is_line, other=0.0)
    square = tl.load(squares + row, mask=is_line, other=0.0)
    for first in range(tl.program_id(1) * COLUMNS, n, COLUMNS * splits):
        place = tl.arange(0, COLUMNS)
        column = first + place
        is_column = column < n
        product = products(centers, row, is_line, column, is_column, channels, channels, CHUNK, PRECISION)
        w_column = tl.load(staying + column, mask=is_column, other=0.0)
        square_column = tl.load(squares + column, mask=is_column, other=0.0)
        d = tl.maximum(square[:, None] + square_column[None, :] - 2.0 * product, 0.0)
        cost = ward_costs(d, (1.0 / w)[:, None], (1.0 / w_column)[None, :])
        joins_column = is_larger(w[:, None], row[:, None], w_column[None, :], column[None, :])
        own = tl.min(tl.where(joins_column, pack(cost, place[None, :], WIDE), no_pair(WIDE)), 1)
        _keep_lowest(pairs, row, own, first + token_of(own), is_line, WIDE)


@triton.jit
def _lowest(bits, count):
    """Whether each number is among the `count` lowest; of equal ones the first. bits: of floats that are not negative.

    By search for the bits of the last one, in quarters: three counts are one number, and one sum over all threads.
    """
    low = tl.sum(tl.zeros_like(bits), 0)
    high = low + _INF_BITS
    for _ in range(_SEARCHES):
        quarter = (high - low) // 4
        first, second, third = low + quarter, low + 2 * quarter, low + 3 * quarter
        each = (bits <= first).to(tl.int64)
        each += (bits <= second).to(tl.int64) << 20
        each += (bits <= third).to(tl.int64) << 40
        counts = tl.sum(each, 0)
        in_first, in_second = (counts & 0xFFFFF) >= count, ((counts >> 20) & 0xFFFFF) >= count
        in_third = (counts >> 40) >= count
        high = tl.where(in_first, first, tl.where(in_second, second, tl.where(in_third, third, high)))
        after = tl.where(in_second, first, tl.where(in_third, second, third)) + 1
        low = tl.where(in_first, low, after)
    below, equal = bits < high, bits == high
    room = count - tl.sum(below.to(tl.int32), 0)
    return below | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))


@triton.jit
def select_kernel(
    pairs, mass, staying, candidates, joined, merged_tokens, rows, counts, again, again_counts,
    tokens, n, k, done, count, r, protected,
    FIRST: tl.constexpr, FINAL: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The k cheapest candidates join: joined and, with protected tokens counted, merged_tokens (B r), from `done` on.

    FIRST: the `count` cheapest tokens become the candidates (B n). rows and counts: the candidates that remain, to be
    searched next unless it is the FINAL round; again and again_counts: those that join a token that joins another.
    staying (B n): the weight of tokens that may be joined.
    """
    image = tl.program_id(0).to(tl.int64)
    pairs += image * n
    staying += image * n
    candidates += image * n
    token = tl.arange(0, N)
    valid = token < n
    pair = tl.load(pairs + token, mask=valid, other=0)
    beyond = tl.full([], _INF_BITS + 1, tl.int32)
    bits = tl.where(valid, (pair >> 32).to(tl.int32), beyond)
    if FIRST:
        is_candidate = _lowest(bits, count)
    else:
        is_candidate = valid & (tl.load(candidates + token, mask=valid, other=0) > 0)
    joins = _lowest(tl.where(is_candidate, bits, beyond), k)
    remains = is_candidate & (joins == 0)
    tl.store(candidates + token, remains.to(tl.int32), mask=valid)
    weight = tl.load(mass + image * n + token, mask=valid, other=0.0)
    tl.store(staying + token, tl.where(joins, 0.0, weight), mask=valid)
    position = done + tl.cumsum(joins.to(tl.int32), 0) - 1
    tl.store(joined + image * r + position, token, mask=joins)
    tl.store(merged_tokens + image * r + position, protected + token, mask=joins)

    mate = tl.where(joins, (pair & 0xFFFFFFFF).to(tl.int32), token) & (N - 1)
    searches = joins & (tl.gather(joins.to(tl.int32), mate, 0) > 0)
    nobody = tl.zeros([N], tl.int64) + (_INF_BITS << 32)
    tl.store(again + image * n + tl.cumsum(searches.to(tl.int32), 0) - 1, token, mask=searches)
    tl.store(again_counts + image, tl.sum(searches.to(tl.int32), 0))
    tl.store(pairs + token, nobody, mask=searches)
    if FINAL == 0:
        tl.store(rows + image * n + tl.cumsum(remains.to(tl.int32), 0) - 1, token, mask=remains)
        tl.store(counts + image, tl.sum(remains.to(tl.int32), 0))
        tl.store(pairs + token, nobody, mask=remains)


@triton.jit
def centers_kernel(
    centers, squares, mass, staying, pairs, joined, channels, n, k, done, r, K: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """centers (B n C), squares (B n): their squared norms, mass and staying (B n) of a token that others joined.

    A program per joining token; the first of those that joined the same one works for all of them.
    """
    image = tl.program_id(1).to(tl.int64)
    centers += image * n * channels
    mass += image * n
    staying += image * n
    pairs += image * n
    joined += image * r + done
    mine = tl.program_id(0)
    target = (tl.load(pairs + tl.load(joined + mine)) & 0xFFFFFFFF).to(tl.int32)
    member = tl.arange(0, K)
    token = tl.load(joined + member, mask=member < k, other=0)
    targets = (tl.load(pairs + token, mask=member < k, other=0) & 0xFFFFFFFF).to(tl.int32)
    same = (targets == target) & (member < k)
    if tl.min(tl.where(same, member, K), 0) < mine:
        return
    channel = tl.arange(0, CHANNELS)
    inside = channel < channels
    total = tl.load(mass + target)
    center = total * tl.load(centers + target * channels + channel, mask=inside, other=0.0).to(tl.float32)
    each = mine
    while each < K:
        one = tl.load(joined + each)
        w = tl.load(mass + one)
        center += w * tl.load(centers + one * channels + channel, mask=inside, other=0.0).to(tl.float32)
        total += w
        tl.store(mass + one, 0.0)
        each = tl.min(tl.where(same & (member > each), member, K), 0)
    center = (center / total).to(centers.dtype.element_ty)
    tl.store(centers + target * channels + channel, center, mask=inside)
    center = center.to(tl.float32)
    tl.store(squares + image * n + target, tl.sum(center * center, 0))
    tl.store(mass + target, total)
    tl.store(staying + target, total)


@triton.jit
def cluster_slots_kernel(
    pairs, joined, slots, is_joined, tokens, n, r, protected,
    N: tl.constexpr, R: tl.constexpr, HOPS: tl.constexpr, PROTECTED: tl.constexpr,
):  # fmt: skip
    """slots (B N), once all r tokens have joined the partners in their pairs (B n). is_joined: B n, scratch, 0."""
    image = tl.program_id(0).to(tl.int64)
    is_joined += image * n
    member = tl.arange(0, R)
    token = tl.load(joined + image * r + member, mask=member < r, other=0)
    tl.store(is_joined + token, tl.full([R], 1, tl.int32), mask=member < r)
    tl.debug_barrier()
    token = tl.arange(0, N)
    valid = token < n
    joins = tl.load(is_joined + token, mask=valid, other=0) > 0
    pair = tl.load(pairs + image * n + token, mask=joins, other=0)
    root = tl.where(joins, (pair & 0xFFFFFFFF).to(tl.int32), token) & (N - 1)
    for _ in tl.static_range(HOPS):  # a target may join another in a later round
        root = tl.gather(root, root, 0)
    kept = valid & (joins == 0)
    slot = protected + tl.gather(tl.cumsum(kept.to(tl.int32), 0) - 1, root, 0)
    slots += image * tokens
    tl.store(slots + protected + token, slot.to(tl.int64), mask=valid)
    leading = tl.arange(0, PROTECTED)
    tl.store(slots + leading, leading.to(tl.int64), mask=leading < protected)
