"""Clustering by Ward's cost: Triton version of `core.clustering`.

Two launches. The first computes the squared distances of all pairs of tokens, in tiles. The second has one program per
image, which runs all rounds: distances stay in the GPU's cache, and a round changes only the rows and columns of the
tokens that others joined. Ranks come from counting smaller values. Threads exchange numbers through memory: a store,
a barrier, a load in another layout.

Axes: B images, N tokens, n of them unprotected, C channels, k tokens that join in a round.
"""

import triton
import triton.language as tl


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
def rounds_kernel(
    distances, weights, mass, best, parent, joined, mixed, slots, order, start,
    tokens, n, pitch, r, protected,
    ROUNDS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, PROTECTED: tl.constexpr,
    HOPS: tl.constexpr,
):  # fmt: skip
    """slots (B N); order (B N): tokens sorted by slot; start (B M+1): where each slot begins in `order`.

    mass, best, parent (B n), joined (B K) and mixed (B K N): scratch. N, K: powers of two, at least n and the tokens of a round.
    """
    image = tl.program_id(0).to(tl.int64)
    distances += image * n * pitch
    weights += image * tokens + protected
    mass += image * n
    best += image * n
    parent += image * n
    joined += image * K
    mixed += image * K * N
    token = tl.arange(0, N)
    valid = token < n
    member = tl.arange(0, K)
    w = tl.load(weights + token, mask=valid, other=0.0)
    root = token
    for number in tl.static_range(ROUNDS):
        k = (r + ROUNDS - 1 - number) // ROUNDS
        if k > 0:
            tl.store(mass + token, w, mask=valid)
            tl.store(parent + token, token, mask=valid)
            tl.debug_barrier()

            # 1. the lowest cost of each token: joining one of larger weight, of equal ones an earlier
            cost = tl.full([N], float("inf"), tl.float32)
            for first in range(0, n, COLUMNS):
                other = first + tl.arange(0, COLUMNS)
                is_other = other < n
                w_other = tl.load(mass + other, mask=is_other, other=0.0)
                keep = valid[:, None] & is_other[None, :]
                d = tl.load(distances + other[None, :] * pitch + token[:, None], mask=keep, other=0.0)
                mine, theirs = w[:, None], w_other[None, :]
                allowed = (theirs > mine) | ((theirs == mine) & (other[None, :] < token[:, None]))
                pair = tl.where(allowed, d * (mine * theirs) / (mine + theirs), float("inf"))
                cost = tl.minimum(cost, tl.min(pair, 1))
            cost = tl.where(valid & (w > 0.0), cost, float("inf"))

            # 2. the k cheapest tokens, by counting cheaper ones
            tl.store(best + token, cost, mask=valid)
            tl.debug_barrier()
            rank = tl.zeros([N], tl.int32)
            for first in range(0, n, COLUMNS):
                other = first + tl.arange(0, COLUMNS)
                cheaper = tl.load(best + other, mask=other < n, other=float("inf"))[None, :]
                ahead = (cheaper < cost[:, None]) | ((cheaper == cost[:, None]) & (other[None, :] < token[:, None]))
                rank += tl.sum((ahead & (other < n)[None, :]).to(tl.int32), 1)
            joins = valid & (rank < k)
            tl.store(joined + rank, token, mask=joins)
            tl.debug_barrier()

            # 3. their partners, the first of equally cheap ones; a partner may join another
            is_member = member < k
            j = tl.load(joined + member, mask=is_member, other=0)
            w_j = tl.where(is_member, tl.load(mass + j), 0.0)
            d_j = tl.load(
                distances + j[:, None] * pitch + token[None, :], mask=is_member[:, None] & valid[None, :], other=0.0
            )
            mine, theirs = w_j[:, None], w[None, :]
            allowed = (theirs > mine) | ((theirs == mine) & (token[None, :] < j[:, None]))
            pair = tl.where(allowed & valid[None, :], d_j * (mine * theirs) / (mine + theirs), float("inf"))
            lowest = tl.min(pair, 1)
            target = tl.min(tl.where(pair == lowest[:, None], token[None, :], N), 1)
            tl.store(parent + j, target, mask=is_member)
            for _ in tl.static_range(HOPS):
                tl.debug_barrier()
                target = tl.load(parent + target, mask=is_member, other=0)
                tl.debug_barrier()
                tl.store(parent + j, target, mask=is_member)
            tl.debug_barrier()
            root = tl.load(parent + root, mask=valid, other=0)

            # 4. weights, then the distances of the tokens that others joined
            to_target = ((token[:, None] == target[None, :]) & is_member[None, :]).to(tl.float32)
            w_new = w + tl.sum(to_target * w_j[None, :], 1)
            if number < ROUNDS - 1:
                tl.store(best + token, w_new, mask=valid)  # best has served: the weights of targets are read from it
                tl.debug_barrier()
                w_target = tl.where(is_member, tl.load(best + target, mask=is_member, other=1.0), 1.0)
                share_j = w_j / w_target
                share_t = tl.where(is_member, tl.load(mass + target, mask=is_member, other=0.0), 0.0) / w_target
                keep = is_member[:, None] & valid[None, :]
                d_t = tl.load(distances + target[:, None] * pitch + token[None, :], mask=keep, other=0.0)
                same = (target[:, None] == target[None, :]) & is_member[None, :] & is_member[:, None]
                mix = tl.where(same, share_j[None, :], 0.0)
                rows = share_t[:, None] * d_t + tl.dot(mix, d_j, input_precision="tf32x3")
                # among targets, columns are means over members as well
                line = mixed + member[:, None] * N
                tl.store(line + token[None, :], rows)
                tl.debug_barrier()
                at_j = tl.load(line + j[None, :])
                at_t = tl.load(line + target[None, :], mask=is_member[None, :], other=0.0)
                among = share_t[None, :] * at_t + tl.dot(at_j, tl.trans(mix), input_precision="tf32x3")
                own = tl.sum(tl.where((member[:, None] == member[None, :]), among, 0.0), 1)
                is_target = tl.sum(to_target, 1) > 0.0
                updated = tl.maximum(rows - 0.5 * own[:, None], 0.0)
                keep = keep & (is_target == 0)[None, :]
                tl.debug_barrier()
                tl.store(distances + target[:, None] * pitch + token[None, :], updated, mask=keep)
                tl.store(distances + token[None, :] * pitch + target[:, None], updated, mask=keep)
                between = tl.maximum(among - 0.5 * own[:, None] - 0.5 * own[None, :], 0.0)
                keep = is_member[:, None] & is_member[None, :]
                tl.store(distances + target[:, None] * pitch + target[None, :], between, mask=keep)
                tl.debug_barrier()
            w = tl.where(joins, 0.0, w_new)

    # 5. slots of the tokens that stay, in their order; the others have the slot of their root
    kept = valid & (root == token)
    own_slot = protected + tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.debug_barrier()
    tl.store(parent + token, own_slot, mask=valid)
    tl.debug_barrier()
    slot = tl.load(parent + root, mask=valid, other=0)
    tl.debug_barrier()
    tl.store(parent + token, slot, mask=valid)
    tl.debug_barrier()
    before = tl.zeros([N], tl.int32)
    earlier = tl.zeros([N], tl.int32)
    for first in range(0, n, COLUMNS):
        other = first + tl.arange(0, COLUMNS)
        is_other = (other < n)[None, :]
        theirs = tl.load(parent + other, mask=other < n, other=0)[None, :]
        before += tl.sum((is_other & (theirs < slot[:, None])).to(tl.int32), 1)
        same_slot = is_other & (theirs == slot[:, None]) & (other[None, :] < token[:, None])
        earlier += tl.sum(same_slot.to(tl.int32), 1)
    slots += image * tokens
    order += image * tokens
    start += image * (tokens - r + 1)
    tl.store(slots + protected + token, slot.to(tl.int64), mask=valid)
    tl.store(order + protected + before + earlier, protected + token, mask=valid)
    tl.store(start + slot, protected + before, mask=kept)
    leading = tl.arange(0, PROTECTED)
    tl.store(slots + leading, leading.to(tl.int64), mask=leading < protected)
    tl.store(order + leading, leading, mask=leading < protected)
    tl.store(start + leading, leading, mask=leading < protected)
    tl.store(start + tokens - r, tokens)
