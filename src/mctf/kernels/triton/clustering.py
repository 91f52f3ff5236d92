"""Clustering by Ward's cost, at most 256 tokens per image: Triton version of `core.clustering`.

The first launch computes the squared distances of all pairs of tokens, in tiles, and the cheapest partner of each
token. The second one holds an image per program and runs all rounds. A round changes few distances: those of the tokens
that others joined. So it searches a token's partner again only where the old one was changed, and compares the others
with the changed tokens alone.

A cost and a partner are one number, a pair: costs are not negative, so their bits are ordered as they are. In float32 a
pair has 64 bits. In reduced precision it has 32, and the partner replaces the last 8 bits of the cost, whose error is
larger than that. So of equal costs the first partner is taken. Tokens are ranked likewise, by 1 / weight: each joins a
token of lower rank, which is one of larger weight, of equal weights an earlier one.

Axes: B images, N tokens, n of them unprotected, C channels, k tokens that join in a round.
"""

import triton
import triton.language as tl


@triton.jit
def pack(number, token, WIDE: tl.constexpr):
    """A number that is not negative and a token, ordered by number, then by token. WIDE: in 64 bits, none lost."""
    bits = number.to(tl.int32, bitcast=True)
    if WIDE:
        packed = (bits.to(tl.int64) << 32) | token
    else:
        packed = (bits & -256) | token
    return packed


@triton.jit
def token_of(packed):
    return (packed & 0xFF).to(tl.int32)


@triton.jit
def no_pair(WIDE: tl.constexpr):
    """Above the pair of any cost and partner."""
    return pack(tl.full([], float("inf"), tl.float32), 0xFF, WIDE)


@triton.jit
def ward_costs(d, inverse, inverse_other):
    """Ward's cost of two tokens, d their squared distance: d w w' / (w + w'), from 1 / w and 1 / w'."""
    root = tl.rsqrt(inverse + inverse_other)  # a division takes several instructions more
    return d * root * root


@triton.jit
def tile_on_or_above_diagonal(number):
    """Row and column of a tile, numbered column by column."""
    column = 0
    while (column + 1) * (column + 2) // 2 <= number:
        column += 1
    return number - column * (column + 1) // 2, column


@triton.jit
def products(x, row, is_row, column, is_column, x_n, channels, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Products of the tokens `row` and the tokens `column`."""
    product = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for start in range(0, channels, CHUNK):
        channel = (start + tl.arange(0, CHUNK))[None, :]
        inside = channel < channels
        a = tl.load(x + row[:, None] * x_n + channel, mask=is_row[:, None] & inside, other=0.0)
        b = tl.load(x + column[:, None] * x_n + channel, mask=is_column[:, None] & inside, other=0.0)
        product = tl.dot(a, tl.trans(b), product, input_precision=PRECISION)
    return product


@triton.jit
def tile_products(
    x, row, column, on_diagonal, n, x_n, channels,
    TILE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`products` of a tile. On the diagonal both sides are the same tokens, which are read once."""
    is_row = row < n
    product = tl.zeros([TILE, TILE], tl.float32)
    if on_diagonal:
        for start in range(0, channels, CHUNK):
            channel = (start + tl.arange(0, CHUNK))[None, :]
            a = tl.load(x + row[:, None] * x_n + channel, mask=is_row[:, None] & (channel < channels), other=0.0)
            product = tl.dot(a, tl.trans(a), product, input_precision=PRECISION)
    else:
        product = products(x, row, is_row, column, column < n, x_n, channels, CHUNK, PRECISION)
    return product


@triton.jit
def partners_kernel(
    x, inverse_norms, inverse_weights, distances, pairs, tokens, channels, n, pitch, protected, x_b, x_n,
    WIDE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """distances (B n pitch): 2 - 2 cos of all pairs. pairs (B TILES n): the lowest cost in each tile, and with whom.

    inverse_norms, inverse_weights: B N.
    A program per tile on or above the diagonal: the distances below it are the same.
    """
    image = tl.program_id(1).to(tl.int64)
    tile_row, tile_column = tile_on_or_above_diagonal(tl.program_id(0))
    row = tile_row * TILE + tl.arange(0, TILE)
    column = tile_column * TILE + tl.arange(0, TILE)
    is_row, is_column = row < n, column < n
    x += image * x_b + protected * x_n
    inverse_norms += image * tokens + protected
    inverse_weights += image * tokens + protected
    distances += image * n * pitch
    pairs += image * n * TILES
    product = tile_products(x, row, column, tile_row == tile_column, n, x_n, channels, TILE, CHUNK, PRECISION)
    inverse_norm = tl.load(inverse_norms + row, mask=is_row, other=0.0)
    inverse_norm_column = tl.load(inverse_norms + column, mask=is_column, other=0.0)
    squared = tl.maximum(2.0 - product * (2.0 * inverse_norm)[:, None] * inverse_norm_column[None, :], 0.0)
    squared = squared.to(distances.dtype.element_ty)
    # a row has room for columns beyond n: without a mask by n, a store writes several numbers
    to_row = distances + row[:, None] * pitch + column[None, :]
    tl.store(to_row, squared, mask=is_row[:, None] & (column < pitch)[None, :])

    inverse = tl.load(inverse_weights + row, mask=is_row, other=float("inf"))
    inverse_column = tl.load(inverse_weights + column, mask=is_column, other=float("inf"))
    cost = ward_costs(squared.to(tl.float32), inverse[:, None], inverse_column[None, :])
    joins_column = pack(inverse_column, column, WIDE)[None, :] < pack(inverse, row, WIDE)[:, None]
    nobody = no_pair(WIDE)
    own = tl.where(joins_column, pack(cost, column[None, :], WIDE), nobody)
    tl.store(pairs + tile_column * n + row, tl.min(own, 1), mask=is_row)
    if tile_row != tile_column:
        to_column = distances + column[:, None] * pitch + row[None, :]
        tl.store(to_column, tl.trans(squared), mask=is_column[:, None] & (row < pitch)[None, :])
        own = tl.where(joins_column, nobody, pack(cost, row[:, None], WIDE))
        tl.store(pairs + tile_row * n + column, tl.min(own, 0), mask=is_column)


@triton.jit
def rounds_kernel(
    distances, weights, inverse_weights, pairs, scratch, slots, order, start,
    tokens, n, pitch, r, rounds, protected,
    WIDE: tl.constexpr, TILES: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HOPS: tl.constexpr, ROWS: tl.constexpr,
    PROTECTED: tl.constexpr,
):  # fmt: skip
    """slots (B N); order (B N): tokens sorted by slot; start (B M+1): where each slot begins in `order`.

    The tokens that stay have slots in their old order, the others the slot of the token that they joined.
    distances (B n pitch) and pairs (B TILES n): of `partners_kernel`, overwritten. scratch: B n.
    N, K: powers of two, at least n and the tokens that join in one round.
    """
    image = tl.program_id(0).to(tl.int64)
    distances += image * n * pitch
    pairs += image * n * TILES
    scratch += image * n
    token = tl.arange(0, N)
    valid = token < n
    member = tl.arange(0, K)
    nobody = no_pair(WIDE)
    taken = nobody + 0xFFFF  # above every key
    w = tl.load(weights + image * tokens + protected + token, mask=valid, other=0.0)
    # not computed here: rounded otherwise than for `partners_kernel`, two tokens could join each other
    inverse = tl.load(inverse_weights + image * tokens + protected + token, mask=valid, other=float("inf"))
    pair = tl.load(pairs + token, mask=valid, other=nobody)
    for tile in tl.static_range(1, TILES):
        pair = tl.minimum(pair, tl.load(pairs + tile * n + token, mask=valid, other=nobody))
    root = token
    for number in range(rounds):
        k = (r + rounds - 1 - number) // rounds  # r in equal parts, the remainder in the first rounds

        # 1. the k cheapest tokens
        alive = w > 0.0
        key = tl.where(alive, (pair & -256) | token, taken)
        j = tl.zeros([K], tl.int32)
        for each in range(k):
            cheapest = token_of(tl.min(key, 0))
            j = tl.where(member == each, cheapest, j)
            key = tl.where(token == cheapest, taken, key)
        joins = alive & (key == taken)

        # 2. a partner may join another: the last of the chain is where its members end
        mate = token_of(pair) & (N - 1)
        parent = tl.where(joins, mate, token)
        for _ in tl.static_range(HOPS):
            parent = tl.gather(parent, parent, 0)
        root = tl.gather(parent, root, 0)

        if number + 1 < rounds:
            # 3. weights
            is_member = member < k
            target = tl.gather(parent, j, 0)
            w_j = tl.where(is_member, tl.gather(w, j, 0), 0.0)
            w_t = tl.gather(w, target, 0)
            is_target = (token[None, :] == target[:, None]) & is_member[:, None]
            added = tl.sum(tl.where(is_target, w_j[:, None], 0.0), 0)
            changed = added > 0.0
            w = tl.where(joins, 0.0, w + added)
            inverse = tl.where(joins | changed, 1.0 / w, inverse)
            total, inverse_t = tl.gather(w, target, 0), tl.gather(inverse, target, 0)
            share_j, share_t = w_j / total, w_t / total
            same = (target[:, None] == target[None, :]) & is_member[None, :]
            mix = tl.where(same, share_j[None, :], 0.0)

            # 4. distances of the tokens that others joined: means over members, less half of the means within
            from_j, from_t = distances + j[:, None] * pitch, distances + target[:, None] * pitch
            inside = is_member[:, None] & (token < pitch)[None, :]
            d_j = tl.load(from_j + token[None, :], mask=inside, other=0.0)
            d_t = tl.load(from_t + token[None, :], mask=inside, other=0.0)
            at_j = share_t[:, None] * _load(from_t + j[None, :]) + _dot(mix, _load(from_j + j[None, :]))
            at_t = share_t[:, None] * _load(from_t + target[None, :]) + _dot(mix, _load(from_j + target[None, :]))
            among = share_t[None, :] * at_t + _dot(at_j, tl.trans(mix))
            own = tl.sum(tl.where(member[:, None] == member[None, :], among, 0.0), 1)
            rows = share_t[:, None] * d_t.to(tl.float32) + _dot(mix.to(d_j.dtype), d_j) - 0.5 * own[:, None]
            rows = tl.maximum(rows, 0.0).to(d_j.dtype)
            between = tl.maximum(among - 0.5 * own[:, None] - 0.5 * own[None, :], 0.0).to(d_j.dtype)
            tl.debug_barrier()  # all threads have loaded
            tl.store(from_t + token[None, :], rows, mask=inside)
            fixed = is_member[:, None] & ((w > 0.0) & (changed == 0))[None, :]
            tl.store(distances + token[None, :] * pitch + target[:, None], rows, mask=fixed)
            tl.debug_barrier()
            tl.store(from_t + target[None, :], between, mask=is_member[:, None] & is_member[None, :])

            # 5. partners: of the tokens that others joined, and of the others among these
            rank, rank_t = pack(inverse, token, WIDE), pack(inverse_t, target, WIDE)
            cost = ward_costs(rows.to(tl.float32), inverse_t[:, None], inverse[None, :])
            is_larger = rank[None, :] < rank_t[:, None]
            lowest = tl.min(tl.where(fixed & is_larger, pack(cost, token[None, :], WIDE), nobody), 1)
            cost_between = ward_costs(between.to(tl.float32), inverse_t[:, None], inverse_t[None, :])
            is_larger_target = (rank_t[None, :] < rank_t[:, None]) & is_member[None, :]
            between_pairs = tl.where(is_larger_target, pack(cost_between, target[None, :], WIDE), nobody)
            lowest = tl.minimum(lowest, tl.min(between_pairs, 1))
            offered = tl.where(fixed & (is_larger == 0), pack(cost, target[:, None], WIDE), nobody)
            offered = tl.min(tl.where(is_target, lowest[:, None], offered), 0)

            # 6. the others whose partner was changed search again, among the unchanged tokens
            touched = tl.gather((joins | changed).to(tl.int32), mate, 0) > 0
            stale = (w > 0.0) & (changed == 0) & touched
            pair = tl.where(changed | stale, offered, tl.minimum(pair, offered))
            count = tl.sum(stale.to(tl.int32), 0)
            if count > 0:
                tl.store(scratch + tl.cumsum(stale.to(tl.int32), 0) - 1, token, mask=stale)
                unchanged = tl.where(changed, taken, rank)
                tl.debug_barrier()
                for first in range(0, count, ROWS):
                    line = first + tl.arange(0, ROWS)
                    is_line = line < count
                    row = tl.load(scratch + line, mask=is_line, other=0)
                    inside_row = is_line[:, None] & (token < pitch)[None, :]
                    d = tl.load(distances + row[:, None] * pitch + token[None, :], mask=inside_row, other=0.0)
                    costs = ward_costs(d.to(tl.float32), tl.gather(inverse, row, 0)[:, None], inverse[None, :])
                    may_join = unchanged[None, :] < tl.gather(rank, row, 0)[:, None]
                    found = tl.where(may_join, pack(costs, token[None, :], WIDE), nobody)
                    tl.store(pairs + row, tl.min(found, 1), mask=is_line)
                tl.debug_barrier()
                pair = tl.minimum(pair, tl.load(pairs + token, mask=stale, other=nobody))
            tl.debug_barrier()

    kept = valid & (root == token)
    slot = protected + tl.gather(tl.cumsum(kept.to(tl.int32), 0) - 1, root, 0)
    slots += image * tokens
    order += image * tokens
    start += image * (tokens - r + 1)
    tl.store(slots + protected + token, slot.to(tl.int64), mask=valid)
    by_slot = tl.sort(tl.where(valid, slot * N + token, 1 << 30))
    tl.store(order + protected + token, protected + by_slot % N, mask=valid)
    before = tl.gather(by_slot, tl.maximum(token - 1, 0), 0) // N
    tl.store(start + by_slot // N, protected + token, mask=valid & ((by_slot // N != before) | (token == 0)))
    leading = tl.arange(0, PROTECTED)
    tl.store(slots + leading, leading.to(tl.int64), mask=leading < protected)
    tl.store(order + leading, leading, mask=leading < protected)
    tl.store(start + leading, leading, mask=leading < protected)
    tl.store(start + tokens - r, tokens)


@triton.jit
def _load(pointers):
    return tl.load(pointers).to(tl.float32)


@triton.jit
def _dot(a, b):
    """Of float32 matrices by three products on the tensor cores."""
    return tl.dot(a, b, input_precision="tf32x3")
