"""Clustering by Ward's cost, at most 256 tokens per image: Triton version of `core.clustering`.

The first launch computes the squared distances of all pairs of tokens, in tiles, and the cheapest partner of each
token. The second one holds an image per program and runs all rounds. A round changes few distances: those of the tokens
that others joined. So it searches a token's partner again only where the old one was changed, and compares the others
with the changed tokens alone.

Axes: B images, N tokens, n of them unprotected, C channels, k tokens that join in a round.
"""

import triton
import triton.language as tl

_PRECISION: tl.constexpr = tl.constexpr("tf32x3")  # float32 by three products on the tensor cores
_NOBODY: tl.constexpr = tl.constexpr(1 << 20)  # above every token


@triton.jit
def partners_kernel(
    x, norms, weights, distances, best, partner, tokens, channels, n, pitch, protected, x_b, x_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """distances (B n pitch): 2 - 2 cos of all pairs. best, partner (B n): the lowest cost of each token, and with whom.

    A token joins one of larger weight; of equal weights the earlier token counts as larger, of equal costs the first
    partner is taken.
    """
    image = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < n
    x += image * x_b + protected * x_n
    norms += image * tokens + protected
    weights += image * tokens + protected
    distances += image * n * pitch
    w = tl.load(weights + row, mask=is_row, other=0.0)
    inverse = 1.0 / tl.maximum(tl.load(norms + row, mask=is_row, other=1.0), 1e-30)
    lowest = tl.full([ROWS], float("inf"), tl.float32)
    chosen = tl.zeros([ROWS], tl.int32)
    for first in range(0, n, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_column = column < n
        product = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, channels, CHUNK):
            channel = start + tl.arange(0, CHUNK)
            inside = channel[None, :] < channels
            a = tl.load(x + row[:, None] * x_n + channel[None, :], mask=is_row[:, None] & inside, other=0.0)
            b = tl.load(x + column[:, None] * x_n + channel[None, :], mask=is_column[:, None] & inside, other=0.0)
            product = tl.dot(a, tl.trans(b), product, input_precision=PRECISION)
        w_column = tl.load(weights + column, mask=is_column, other=0.0)
        inverse_column = 1.0 / tl.maximum(tl.load(norms + column, mask=is_column, other=1.0), 1e-30)
        squared = tl.maximum(2.0 - 2.0 * product * inverse[:, None] * inverse_column[None, :], 0.0)
        squared = squared.to(distances.dtype.element_ty)
        keep = is_row[:, None] & is_column[None, :]
        tl.store(distances + row[:, None] * pitch + column[None, :], squared, mask=keep)
        cost = join_costs(squared.to(tl.float32), w[:, None], w_column[None, :], row[:, None], column[None, :])
        low, at = tl.min(cost, 1, return_indices=True)
        chosen = tl.where(low < lowest, first + at, chosen)
        lowest = tl.minimum(low, lowest)
    tl.store(best + image * n + row, lowest, mask=is_row)
    tl.store(partner + image * n + row, chosen, mask=is_row)


@triton.jit
def join_costs(d, mine, theirs, token, other):
    """Ward's cost of joining `other`, d its squared distance; inf unless its weight is larger."""
    larger = (theirs > mine) | ((theirs == mine) & (other < token))
    joined = mine * (theirs / (mine + theirs))  # the product of large weights may overflow
    return tl.where(larger, d * joined, float("inf"))


@triton.jit
def rounds_kernel(
    distances, weights, best, partner, scratch, slots, order, start, tokens, n, pitch, r, rounds, protected,
    N: tl.constexpr, K: tl.constexpr, HOPS: tl.constexpr, ROWS: tl.constexpr, PROTECTED: tl.constexpr,
):  # fmt: skip
    """slots (B N); order (B N): tokens sorted by slot; start (B M+1): where each slot begins in `order`.

    The tokens that stay have slots in their old order, the others the slot of the token that they joined.
    distances (B n pitch), best and partner (B n): of `partners_kernel`, overwritten. scratch: B n.
    N, K: powers of two, at least n and the tokens that join in one round.
    """
    image = tl.program_id(0).to(tl.int64)
    distances += image * n * pitch
    best += image * n
    partner += image * n
    scratch += image * n
    token = tl.arange(0, N)
    valid = token < n
    member = tl.arange(0, K)
    w = tl.load(weights + image * tokens + protected + token, mask=valid, other=0.0)
    cost = tl.load(best + token, mask=valid, other=float("inf"))
    mate = tl.load(partner + token, mask=valid, other=0)
    root = token
    for number in range(rounds):
        k = (r + rounds - 1 - number) // rounds  # r in equal parts, the remainder in the first rounds

        # 1. the k cheapest tokens: costs, which are not negative, are ordered as their bits are
        key = (cost.to(tl.int32, bitcast=True).to(tl.int64) << 32) + token
        ordered = tl.sort(key)
        joins = (key <= tl.sum(tl.where(token == k - 1, ordered, 0), 0)) & (k > 0)

        # 2. a partner may join another: the last of the chain is where its members end
        parent = tl.where(joins, mate, token)
        for _ in tl.static_range(HOPS):
            parent = tl.gather(parent, parent, 0)
        root = tl.gather(parent, root, 0)

        if number + 1 < rounds:
            # 3. weights
            is_member = member < k
            j = tl.gather((ordered & 0xFFFF).to(tl.int32), member, 0)
            target = tl.gather(parent, j, 0)
            w_j = tl.where(is_member, tl.gather(w, j, 0), 0.0)
            w_t = tl.where(is_member, tl.gather(w, target, 0), 0.0)
            same = (target[:, None] == target[None, :]) & is_member[None, :] & is_member[:, None]
            total = tl.where(is_member, w_t + tl.sum(tl.where(same, w_j[None, :], 0.0), 1), 1.0)
            hit = (token[None, :] == target[:, None]) & is_member[:, None]
            w_changed = tl.max(tl.where(hit, total[:, None], 0.0), 0)
            changed = w_changed > 0.0
            w = tl.where(joins, 0.0, tl.where(changed, w_changed, w))

            # 4. distances of the tokens that others joined: means over members, less half of the means within
            share_j, share_t = w_j / total, w_t / total
            mix = tl.where(same, share_j[None, :], 0.0)
            from_j, from_t = distances + j[:, None] * pitch, distances + target[:, None] * pitch
            at_j = share_t[:, None] * _load(from_t + j[None, :]) + _dot(mix, _load(from_j + j[None, :]))
            at_t = share_t[:, None] * _load(from_t + target[None, :]) + _dot(mix, _load(from_j + target[None, :]))
            among = share_t[None, :] * at_t + _dot(at_j, tl.trans(mix))
            own = tl.sum(tl.where(member[:, None] == member[None, :], among, 0.0), 1)
            keep = is_member[:, None] & valid[None, :]
            d_j = tl.load(from_j + token[None, :], mask=keep, other=0.0).to(tl.float32)
            d_t = tl.load(from_t + token[None, :], mask=keep, other=0.0).to(tl.float32)
            rows = tl.maximum(share_t[:, None] * d_t + _dot(mix, d_j) - 0.5 * own[:, None], 0.0)
            rows = rows.to(distances.dtype.element_ty)
            tl.debug_barrier()  # all threads have loaded
            tl.store(from_t + token[None, :], rows, mask=keep)
            tl.store(distances + token[None, :] * pitch + target[:, None], rows, mask=keep)
            tl.debug_barrier()
            between = tl.maximum(among - 0.5 * own[:, None] - 0.5 * own[None, :], 0.0)
            both = is_member[:, None] & is_member[None, :]
            tl.store(from_t + target[None, :], between.to(distances.dtype.element_ty), mask=both)

            # 5. partners: of the changed tokens, or the old one; searched again where the old one was changed
            offered = join_costs(rows.to(tl.float32), w[None, :], total[:, None], token[None, :], target[:, None])
            offered = tl.where(keep, offered, float("inf"))
            low = tl.min(offered, 0)
            at = tl.min(tl.where(offered == low[None, :], target[:, None], _NOBODY), 0)
            touched = (joins | changed).to(tl.int32)
            stale = (w > 0.0) & (changed | (tl.gather(touched, mate, 0) > 0))
            better = (low < cost) | ((low == cost) & (at < mate))
            mate = tl.where(better & ~stale, at, mate)
            cost = tl.where(better, low, cost)
            count = tl.sum(stale.to(tl.int32), 0)
            tl.store(scratch + tl.cumsum(stale.to(tl.int32), 0) - 1, token, mask=stale)
            tl.debug_barrier()
            for first in range(0, count, ROWS):
                line = first + tl.arange(0, ROWS)
                is_line = line < count
                row = tl.load(scratch + line, mask=is_line, other=0)
                w_row = tl.gather(w, row, 0)
                d = _load_masked(distances + row[:, None] * pitch + token[None, :], is_line[:, None] & valid[None, :])
                each = join_costs(d, w_row[:, None], w[None, :], row[:, None], token[None, :])
                low_of_row, at_of_row = tl.min(each, 1, return_indices=True)
                tl.store(best + row, low_of_row, mask=is_line)
                tl.store(partner + row, at_of_row, mask=is_line)
            tl.debug_barrier()
            cost = tl.where(stale, tl.load(best + token, mask=stale, other=0.0), cost)
            mate = tl.where(stale, tl.load(partner + token, mask=stale, other=0), mate)
            cost = tl.where(w > 0.0, cost, float("inf"))
            mate = tl.where(w > 0.0, mate, token)

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
def _load_masked(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision=_PRECISION)
