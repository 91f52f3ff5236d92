"""Matching of many tokens, or of few images, by many programs: Triton twin of `core.matching`.

One program cannot hold the scores of more than 128 x 128 pairs, and a single image would leave a GPU idle. So
matching becomes five launches: the scores, with the best partner of each alpha token; who leaves alpha; the best
partner of each beta token among those that stay (not one way); slots; tokens sorted by slot. Everything that would
need a sort is counted: a token's rank is the number of larger values. Those that leave are put on a list by rank: every
slot has one token that stays, so what is to be known of the others, where slots begin, is told by this short list.

Axes: B images, N tokens, Na and Nb unprotected tokens in even and odd places, C channels, M slots, r that leave.
"""

import triton
import triton.language as tl

from ._common import single
from .matching import best, pair_scores, side_tokens, total_received


@triton.jit
def scores_kernel(
    x, lengths, informativeness, sizes, scores, pairs,
    tokens, channels, alphas, betas, pitch, protected, tau_sim, tau_info, tau_size, x_b, x_n,
    HAS_SIZES: tl.constexpr, POWER: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attraction of a tile of pairs: scores (B Na pitch), and the best of each row with its column: pairs (B Na).

    The pitch is Nb or a little more, with -inf in the columns that are too many: rows that begin at multiples of 16
    are written and read several numbers at a time.

    pairs holds both in one integer that the tiles of a row can maximise: the bits of the score, which is positive,
    above the column counted from the last, so that of equal scores the first wins.
    """
    tau_sim, tau_info, tau_size = single(tau_sim), single(tau_info), single(tau_size)
    image = tl.program_id(2).to(tl.int64)
    alpha_places = tl.program_id(0) * A + tl.arange(0, A)
    beta_places = tl.program_id(1) * B + tl.arange(0, B)
    is_alpha, is_beta = alpha_places < alphas, beta_places < betas
    alpha_tokens, beta_tokens = side_tokens(alpha_places, protected, False), side_tokens(beta_places, protected, True)
    informativeness += image * tokens
    score = pair_scores(
        x + image * x_b, lengths + image * tokens,
        total_received(informativeness, tokens, alpha_tokens, is_alpha, 1),
        total_received(informativeness, tokens, beta_tokens, is_beta, 1),
        sizes + image * tokens, alpha_tokens, beta_tokens, is_alpha, is_beta,
        channels, tau_sim, tau_info, tau_size, x_n, HAS_SIZES, POWER, A, B, CHUNK, PRECISION,
    )  # fmt: skip
    where = (image * alphas + alpha_places[:, None]) * pitch + beta_places[None, :]
    tl.store(scores + where, score, mask=is_alpha[:, None] & (beta_places < pitch)[None, :])
    top, column = best(score, beta_places, 1)
    bits = tl.maximum(top, 0.0).to(tl.int32, bitcast=True).to(tl.int64) << 32
    packed = bits + tl.maximum(betas - 1 - column, 0)
    tl.atomic_max(pairs + image * alphas + alpha_places, packed, mask=is_alpha)


@triton.jit
def _values_ahead(values, others, value, places):
    """How many of a tile of values come before each value, from large to small, equal values by index."""
    earlier = others[None, :] < places[:, None]
    before = (values[None, :] > value[:, None]) | ((values[None, :] == value[:, None]) & earlier)
    return tl.sum(before.to(tl.int32), 1)


@triton.jit
def leaving_kernel(
    pairs, gone, partner, leavers, alphas, betas, r, forth, protected, MINE: tl.constexpr, OTHERS: tl.constexpr
):  # fmt: skip
    """Who leaves alpha, and the beta token each alpha token likes best: gone and partner (B Na).

    Tokens that leave are the first of `leavers` (B r).
    """
    image = tl.program_id(1).to(tl.int64)
    pairs += image * alphas
    places = tl.program_id(0) * MINE + tl.arange(0, MINE)
    mine = tl.load(pairs + places, mask=places < alphas, other=0)
    rank = tl.zeros([MINE], tl.int32)
    for first in range(0, alphas, OTHERS):
        others = first + tl.arange(0, OTHERS)
        values = tl.load(pairs + others, mask=others < alphas, other=0) >> 32
        rank += _values_ahead(tl.where(others < alphas, values, -1), others, mine >> 32, places)
    leaves = (rank < forth) & (places < alphas)
    tl.store(gone + image * alphas + places, leaves.to(tl.int32), mask=places < alphas)
    tl.store(leavers + image * r + rank, side_tokens(places, protected, False), mask=leaves)
    column = betas - 1 - (mine & 0xFFFFFFFF).to(tl.int32)
    tl.store(partner + image * alphas + places, column, mask=places < alphas)


@triton.jit
def back_kernel(
    scores, alpha_gone, strength, partner, alphas, betas, pitch, A: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """The best pair of each beta token with an alpha token that stays, and whose it is: strength, partner (B Nb)."""
    image = tl.program_id(1).to(tl.int64)
    scores += image * alphas * pitch
    beta_places = tl.program_id(0) * B + tl.arange(0, B)
    is_beta = beta_places < betas
    strongest = tl.full([B], float("-inf"), tl.float32)
    chosen = tl.zeros([B], tl.int32)
    for first in range(0, alphas, A):
        places = first + tl.arange(0, A)
        stays = tl.load(alpha_gone + image * alphas + places, mask=places < alphas, other=1) == 0
        where = places[:, None] * pitch + beta_places[None, :]
        score = tl.load(scores + where, mask=stays[:, None] & (beta_places < pitch)[None, :], other=float("-inf"))
        top, place = best(score, places, 0)
        chosen = tl.where(top > strongest, place, chosen)
        strongest = tl.maximum(top, strongest)
    tl.store(strength + image * betas + beta_places, strongest, mask=is_beta)
    tl.store(partner + image * betas + beta_places, chosen, mask=is_beta)


@triton.jit
def _kept_slots(leavers, places, forth, protected, OTHERS: tl.constexpr):
    """Slot of each staying alpha token: how many stay before it."""
    tokens = side_tokens(places, protected, False)
    slots = protected + places
    for first in range(0, forth, OTHERS):
        others = first + tl.arange(0, OTHERS)
        leaver = tl.load(leavers + others, mask=others < forth, other=1 << 20)
        slots -= tl.sum((leaver[None, :] < tokens[:, None]).to(tl.int32), 1)
    return slots


@triton.jit
def slots_kernel(
    alpha_gone, alpha_partner, beta_strength, beta_partner, leavers, slots,
    tokens, alphas, betas, r, forth, protected,
    BIDIRECTIONAL: tl.constexpr, MINE: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """slots (B N) of a tile of tokens, from the partners of both sides; beta tokens that leave join `leavers` (B r)."""
    image = tl.program_id(1).to(tl.int64)
    alpha_gone += image * alphas
    leavers += image * r
    beta_strength += image * betas
    token = tl.program_id(0) * MINE + tl.arange(0, MINE)
    odd = token % 2 == 1
    free = (token >= protected) & (token < tokens)
    place = tl.where(odd, token - (protected + 1 - protected % 2), token - (protected + protected % 2)) // 2
    leaves = free & (odd == 0) & (tl.load(alpha_gone + place, mask=free & (odd == 0), other=0) != 0)
    # an alpha token that leaves shares the slot of its beta token
    beta = tl.where(odd, place, tl.load(alpha_partner + image * alphas + place, mask=leaves, other=0))
    on_beta = (free & odd) | leaves
    moves = token < 0
    host = place
    beta_slot = beta + protected + alphas - forth
    if BIDIRECTIONAL:
        mine = tl.load(beta_strength + beta, mask=on_beta, other=0.0)
        rank = tl.zeros([MINE], tl.int32)
        for first in range(0, betas, OTHERS):
            others = first + tl.arange(0, OTHERS)
            values = tl.load(beta_strength + others, mask=others < betas, other=float("-inf"))
            rank += _values_ahead(values, others, mine, beta)
        moves = on_beta & (rank < r - forth)
        host = tl.load(beta_partner + image * betas + beta, mask=moves, other=0)
        beta_slot = rank + protected + alphas - r
        tl.store(leavers + forth + rank, token, mask=moves & odd)
    alpha = tl.where(moves, host, place)
    slot = tl.where(on_beta & (moves == 0), beta_slot, _kept_slots(leavers, alpha, forth, protected, OTHERS))
    slot = tl.where(token < protected, token, slot)
    tl.store(slots + image * tokens + token, slot.to(tl.int64), mask=token < tokens)


@triton.jit
def members_kernel(slots, leavers, order, start, tokens, count, MINE: tl.constexpr, OTHERS: tl.constexpr):
    """order (B N): tokens sorted by slot; start (B M+1): where each slot, none of them empty, begins in `order`.

    A slot has one token that stays, then those that left for it.
    """
    image = tl.program_id(1).to(tl.int64)
    left = tokens - count
    slots += image * tokens
    leavers += image * left
    start += image * (count + 1)
    token = tl.program_id(0) * MINE + tl.arange(0, MINE)
    slot = tl.load(slots + token, mask=token < tokens, other=0).to(tl.int32)
    begin = slot
    place = tl.zeros([MINE], tl.int32)
    leaves = tl.zeros([MINE], tl.int32)
    for first in range(0, left, OTHERS):
        others = first + tl.arange(0, OTHERS)
        leaver = tl.load(leavers + others, mask=others < left, other=1 << 20)
        other = tl.load(slots + leaver, mask=others < left, other=count).to(tl.int32)
        begin += tl.sum((other[None, :] < slot[:, None]).to(tl.int32), 1)
        alike = (other[None, :] == slot[:, None]) & (leaver[None, :] <= token[:, None])
        place += tl.sum(alike.to(tl.int32), 1)
        leaves += tl.sum((leaver[None, :] == token[:, None]).to(tl.int32), 1)
    place = tl.where(leaves > 0, place, 0)
    tl.store(order + image * tokens + begin + place, token, mask=token < tokens)
    tl.store(start + slot, begin, mask=(token < tokens) & (leaves == 0))
    tl.store(start + count, tokens)
