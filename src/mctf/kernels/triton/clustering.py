"""Clustering by Ward's cost, at most 256 tokens per image: Triton version of `core.clustering`.

The first launch computes the squared distances of all pairs of tokens, in tiles, and the lowest cost of each token. The
second one holds an image per program and runs all rounds. It reads and updates the rows of the candidates alone, a few
at a time.

A cost and a token are one number, a pair: costs are not negative, so their bits are ordered as they are. In float32 a
pair has 64 bits. In reduced precision it has 32, and the token replaces the last 8 bits of the cost, whose error is
larger than that. So of equal costs the first token is taken.

Axes: B images, N tokens, n of them unprotected, C channels, K candidates, k tokens that join in a round.
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
def is_larger(w, token, w_other, other):
    """Whether `other` has the larger weight; of equal weights the earlier is larger."""
    return (w_other > w) | ((w_other == w) & (other < token))


@triton.jit
def _finish_tile(
    product, row, column, on_diagonal, inverse_norm, inverse_norms, w, weights, distances, lowest_of_columns, n, pitch
):
    """Stores a tile's distances, on both sides of the diagonal, and its columns' lowest costs; returns its rows'."""
    is_row, is_column = row < n, column < n
    inverse_norm_column = tl.load(inverse_norms + column, mask=is_column, other=0.0)
    d = tl.maximum(product * inverse_norm[:, None] * inverse_norm_column[None, :] + 2.0, 0.0)
    # a row has room for columns beyond n: without a mask by n, a store writes several numbers
    to_row = distances + row[:, None] * pitch + column[None, :]
    squared = d.to(distances.dtype.element_ty)
    tl.store(to_row, squared, mask=is_row[:, None] & (column < pitch)[None, :])
    w_column = tl.load(weights + column, mask=is_column, other=0.0)
    cost = ward_costs(d, (1.0 / w)[:, None], (1.0 / w_column)[None, :])
    inf = float("inf")
    if on_diagonal:
        larger = is_larger(w[:, None], row[:, None], w_column[None, :], column[None, :])
        own = tl.min(tl.where(larger, cost, inf), 1)
    else:  # every row is earlier than every column
        larger = w_column[None, :] > w[:, None]
        own = tl.min(tl.where(larger, cost, inf), 1)
        tl.store(lowest_of_columns + column, tl.min(tl.where(larger, inf, cost), 0), mask=is_column)
        to_column = distances + column[:, None] * pitch + row[None, :]
        tl.store(to_column, tl.trans(squared), mask=is_column[:, None] & (row < pitch)[None, :])
    return own


@triton.jit
def distances_kernel(
    x, inverse_norms, weights, distances, lowest, tokens, channels, n, pitch, protected, x_b, x_n,
    TILE: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """distances (B n pitch): 2 - 2 cos of all pairs. lowest (B TILES n): the lowest cost of joining, in each tile.

    inverse_norms, weights: B N. A program per tile on or above the diagonal serves its rows and its columns.
    """
    image = tl.program_id(1).to(tl.int64)
    tile_row, tile_column = tile_on_or_above_diagonal(tl.program_id(0))
    row = tile_row * TILE + tl.arange(0, TILE)
    is_row = row < n
    x += image * x_b + protected * x_n
    inverse_norms += image * tokens + protected
    weights += image * tokens + protected
    distances += image * n * pitch
    lowest += image * n * TILES
    on_diagonal = tile_row == tile_column
    column = tile_column * TILE + tl.arange(0, TILE)
    product = tile_products(x, row, column, on_diagonal, n, x_n, channels, TILE, CHUNK, PRECISION)
    inverse_norm = -2.0 * tl.load(inverse_norms + row, mask=is_row, other=0.0)
    w = tl.load(weights + row, mask=is_row, other=0.0)
    # one half of the columns after the other, in fewer registers
    left, right = tl.split(tl.permute(tl.reshape(product, [TILE, 2, TILE // 2]), [0, 2, 1]))
    column = tile_column * TILE + tl.arange(0, TILE // 2)
    own = _finish_tile(
        left, row, column, on_diagonal, inverse_norm, inverse_norms, w, weights, distances,
        lowest + tile_row * n, n, pitch,
    )  # fmt: skip
    other = _finish_tile(
        right, row, column + TILE // 2, on_diagonal, inverse_norm, inverse_norms, w, weights, distances,
        lowest + tile_row * n, n, pitch,
    )  # fmt: skip
    own = tl.minimum(own, other)
    tl.store(lowest + tile_column * n + row, own, mask=is_row)


@triton.jit
def rounds_kernel(
    distances, weights, lowest, rows, scores, targets, slots, order, start,
    tokens, n, pitch, r, rounds, candidates, protected,
    WIDE: tl.constexpr, TILES: tl.constexpr, N: tl.constexpr, K: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr,
    PROTECTED: tl.constexpr,
):  # fmt: skip
    """slots (B N); order (B N): tokens sorted by slot; start (B M+1): where each slot begins in `order`.

    The tokens that stay have slots in their old order, the others the slot of the token that they joined.
    distances (B n pitch) and lowest (B TILES n): of `distances_kernel`; rows of candidates are overwritten.
    rows, scores, targets: B K, scratch. N, K, J: powers of two, at least n, `candidates` and the tokens that join in
    one round. Programs take ROWS rows at a time.
    """
    image = tl.program_id(0).to(tl.int64)
    distances += image * n * pitch
    lowest += image * n * TILES
    rows += image * K
    scores += image * K
    targets += image * K
    token = tl.arange(0, N)
    valid = token < n
    in_row = token < pitch
    place = tl.arange(0, K)
    line = tl.arange(0, ROWS)
    member = tl.arange(0, J)
    inf = float("inf")
    w = tl.load(weights + image * tokens + protected + token, mask=valid, other=0.0)
    cost = tl.load(lowest + token, mask=valid, other=inf)
    for tile in tl.static_range(1, TILES):
        cost = tl.minimum(cost, tl.load(lowest + tile * n + token, mask=valid, other=inf))
    by_cost = tl.sort(tl.where(valid, pack(cost, token, WIDE), no_pair(WIDE)))
    tl.store(rows + token, token_of(by_cost), mask=token < candidates)
    root = token
    within = tl.zeros([N], tl.float32)  # mean squared distance between two members of a cluster
    left = r
    begin = 0
    for number in range(rounds):
        k = tl.maximum(2 * left // (rounds - number + 1), 1)
        left -= k
        tl.debug_barrier()

        # 1. the k cheapest leave, each for the cheapest token that stays
        is_member = member < k
        j = tl.load(rows + begin + member, mask=is_member, other=0)
        is_joining = is_member[:, None] & (j[:, None] == token[None, :])
        leaves = tl.max(is_joining.to(tl.int32), 0) > 0
        staying = tl.where(leaves, 0.0, w)
        inverse = 1.0 / staying
        for first in range(0, k, ROWS):
            is_line = first + line < k
            row = tl.load(rows + begin + first + line, mask=is_line, other=0)
            d = tl.load(distances + row[:, None] * pitch + token[None, :], mask=in_row[None, :], other=0.0)
            w_row = tl.gather(w, row, 0)
            costs = _costs(d.to(tl.float32), tl.gather(within, row, 0), within, w_row, inverse)
            larger = is_larger(w_row[:, None], row[:, None], staying[None, :], token[None, :])
            pairs = tl.where(larger, pack(costs, token[None, :], WIDE), no_pair(WIDE))
            tl.store(targets + first + line, token_of(tl.min(pairs, 1)) & (N - 1), mask=is_line)
        tl.debug_barrier()
        target = tl.load(targets + member, mask=is_member, other=0)
        parent = tl.where(leaves, tl.sum(tl.where(is_joining, target[:, None], 0), 0), token)
        root = tl.gather(parent, root, 0)
        begin += k

        if number + 1 < rounds:
            # 2. weights; means of squared distances: columns, and rows of the tokens that joined
            w_joining = tl.where(is_member, tl.gather(w, j, 0), 0.0)
            into = is_member[:, None] & (target[:, None] == token[None, :])
            w = staying + tl.sum(tl.where(into, w_joining[:, None], 0.0), 0)
            inverse = 1.0 / w
            share = w_joining / tl.gather(w, target, 0)
            shares = tl.where(into, share[:, None], 0.0)
            stays = 1.0 - tl.sum(shares, 0)
            inside = is_member[:, None] & in_row[None, :]
            joining = tl.load(distances + j[:, None] * pitch + token[None, :], mask=inside, other=0.0).to(tl.float32)
            before = tl.sum(shares * joining, 0)
            columns = tl.load(distances + j[:, None] * pitch + j[None, :])
            of_columns = _operand(shares, WIDE)
            joining = stays[None, :] * joining + _mean(columns, of_columns, WIDE)
            after = tl.sum(shares * joining, 0)
            within = stays * (stays * within + before) + after
            of_rows = _operand(joining, WIDE)

            # 3. the candidates that remain, sorted by their lowest costs
            for first in range(begin, candidates, ROWS):
                is_line = first + line < candidates
                row = tl.load(rows + first + line, mask=is_line, other=0)
                own = distances + row[:, None] * pitch
                in_rows = is_line[:, None] & in_row[None, :]
                d = tl.load(own + token[None, :], mask=in_rows, other=0.0).to(tl.float32)
                d = stays[None, :] * d + _mean(tl.load(own + j[None, :]), of_columns, WIDE)
                is_target = is_member[None, :] & (row[:, None] == target[None, :])
                own_shares = _operand(tl.where(is_target, share[None, :], 0.0), WIDE)
                d = tl.gather(stays, row, 0)[:, None] * d + _mean(own_shares, of_rows, WIDE)
                w_row = tl.gather(w, row, 0)
                costs = _costs(d, tl.gather(within, row, 0), within, w_row, inverse)
                larger = is_larger(w_row[:, None], row[:, None], w[None, :], token[None, :])
                tl.store(scores + first + line, tl.min(tl.where(larger, costs, inf), 1), mask=is_line)
                tl.debug_barrier()  # all threads have loaded
                tl.store(own + token[None, :], d.to(distances.dtype.element_ty), mask=in_rows)
            tl.debug_barrier()
            remains = (place >= begin) & (place < candidates)
            score = tl.load(scores + place, mask=remains, other=inf)
            remaining = tl.load(rows + place, mask=remains, other=0)
            by_score = tl.sort(tl.where(remains, pack(score, remaining, WIDE), no_pair(WIDE)))
            tl.debug_barrier()
            tl.store(rows + begin + place, token_of(by_score), mask=begin + place < candidates)

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
def _costs(d, within_row, within, w_row, inverse):
    """Ward's costs of rows: d are means of squared distances, less half of those within both clusters."""
    apart = tl.maximum(d - 0.5 * within_row[:, None] - 0.5 * within[None, :], 0.0)
    return ward_costs(apart, (1.0 / w_row)[:, None], inverse[None, :])


@triton.jit
def _operand(matrix, WIDE: tl.constexpr):
    """A matrix of shares or of distances as it is multiplied: in reduced precision in float16."""
    if WIDE:
        operand = matrix
    else:
        operand = matrix.to(tl.float16)
    return operand


@triton.jit
def _mean(a, b, WIDE: tl.constexpr):
    """Product of shares and distances on the tensor cores; of float32 matrices by three products."""
    if WIDE:
        product = tl.dot(a, b, input_precision="tf32x3")
    else:
        product = tl.dot(a, b)
    return product
