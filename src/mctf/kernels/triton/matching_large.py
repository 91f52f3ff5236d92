"""Matching of many tokens, or of few images, by many programs: Triton version of `core.matching`.

One program cannot hold the scores of more than 128 x 128 pairs, and a single image would leave a GPU idle. So
matching takes five launches: the scores, with the best partner of each alpha token; the alpha tokens that are merged;
the best partner of each beta token among the kept alpha tokens (bidirectional only); slots; tokens sorted by slot.
Sorting is replaced by counting: a token's rank is the number of larger values. Merged tokens are listed by rank: every
slot has exactly one kept token, so where a slot begins follows from this short list.

Axes: B images, N tokens, Na and Nb unprotected tokens in even and odd positions (alpha and beta), C channels, M slots,
r merged tokens. BLOCK: tokens per program; OTHERS: tokens they are compared with at a time.
"""

import triton
import triton.language as tl

from ._common import to_float32
from .matching import max_with_index, pair_scores, side_tokens, total_received


@triton.jit
def scores_kernel(
    x, norms, informativeness, sizes, scores, best_pairs,
    tokens, channels, alphas, betas, pitch, protected, tau_sim, tau_info, tau_size, x_b, x_n,
    HAS_SIZES: tl.constexpr, POWER: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of pairs (B Na pitch), and the best score of each row with its column: best_pairs (B Na).

    The pitch is Nb rounded up to a multiple of 16, with -inf in the additional columns: aligned rows are written and
    read several numbers at a time.

    best_pairs packs score and column in one integer, whose maximum the tiles of a row compute atomically: the bits of
    the score, which is not negative, above the column counted from the last, so that the first of equal scores wins.
    """
    tau_sim, tau_info, tau_size = to_float32(tau_sim), to_float32(tau_info), to_float32(tau_size)
    image = tl.program_id(2).to(tl.int64)
    alpha_index = tl.program_id(0) * A + tl.arange(0, A)
    beta_index = tl.program_id(1) * B + tl.arange(0, B)
    is_alpha, is_beta = alpha_index < alphas, beta_index < betas
    alpha_tokens, beta_tokens = side_tokens(alpha_index, protected, False), side_tokens(beta_index, protected, True)
    informativeness += image * tokens
    score = pair_scores(
        x + image * x_b, norms + image * tokens,
        total_received(informativeness, tokens, alpha_tokens, is_alpha, 1),
        total_received(informativeness, tokens, beta_tokens, is_beta, 1),
        sizes + image * tokens, alpha_tokens, beta_tokens, is_alpha, is_beta,
        channels, tau_sim, tau_info, tau_size, x_n, HAS_SIZES, POWER, A, B, CHUNK, PRECISION,
    )  # fmt: skip
    offset = (image * alphas + alpha_index[:, None]) * pitch + beta_index[None, :]
    tl.store(scores + offset, score, mask=is_alpha[:, None] & (beta_index < pitch)[None, :])
    top, column = max_with_index(score, beta_index, 1)
    bits = tl.maximum(top, 0.0).to(tl.int32, bitcast=True).to(tl.int64) << 32
    packed = bits + tl.maximum(betas - 1 - column, 0)
    tl.atomic_max(best_pairs + image * alphas + alpha_index, packed, mask=is_alpha)


@triton.jit
def _count_ahead(values, others, value, index):
    """How many of a tile of values come before each value, from large to small, equal values by index."""
    earlier = others[None, :] < index[:, None]
    before = (values[None, :] > value[:, None]) | ((values[None, :] == value[:, None]) & earlier)
    return tl.sum(before.to(tl.int32), 1)


@triton.jit
def alpha_merges_kernel(
    best_pairs, alpha_merged, partner, merged_tokens, alphas, betas, r, r_alpha, protected,
    BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Whether each alpha token is merged, and its best beta token: alpha_merged and partner (B Na).

    The merged tokens are the first of `merged_tokens` (B r).
    """
    image = tl.program_id(1).to(tl.int64)
    best_pairs += image * alphas
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    best_pair = tl.load(best_pairs + index, mask=index < alphas, other=0)
    rank = tl.zeros([BLOCK], tl.int32)
    for first in range(0, alphas, OTHERS):
        others = first + tl.arange(0, OTHERS)
        values = tl.load(best_pairs + others, mask=others < alphas, other=0) >> 32
        rank += _count_ahead(tl.where(others < alphas, values, -1), others, best_pair >> 32, index)
    merged = (rank < r_alpha) & (index < alphas)
    tl.store(alpha_merged + image * alphas + index, merged.to(tl.int32), mask=index < alphas)
    tl.store(merged_tokens + image * r + rank, side_tokens(index, protected, False), mask=merged)
    column = betas - 1 - (best_pair & 0xFFFFFFFF).to(tl.int32)
    tl.store(partner + image * alphas + index, column, mask=index < alphas)


@triton.jit
def beta_partners_kernel(
    scores, alpha_merged, strength, partner, alphas, betas, pitch, A: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """The best score of each beta token with a kept alpha token, and that token: strength and partner (B Nb)."""
    image = tl.program_id(1).to(tl.int64)
    scores += image * alphas * pitch
    beta_index = tl.program_id(0) * B + tl.arange(0, B)
    is_beta = beta_index < betas
    strongest = tl.full([B], float("-inf"), tl.float32)
    chosen = tl.zeros([B], tl.int32)
    for first in range(0, alphas, A):
        alpha_index = first + tl.arange(0, A)
        kept = tl.load(alpha_merged + image * alphas + alpha_index, mask=alpha_index < alphas, other=1) == 0
        offset = alpha_index[:, None] * pitch + beta_index[None, :]
        score = tl.load(scores + offset, mask=kept[:, None] & (beta_index < pitch)[None, :], other=float("-inf"))
        top, top_index = max_with_index(score, alpha_index, 0)
        chosen = tl.where(top > strongest, top_index, chosen)
        strongest = tl.maximum(top, strongest)
    tl.store(strength + image * betas + beta_index, strongest, mask=is_beta)
    tl.store(partner + image * betas + beta_index, chosen, mask=is_beta)


@triton.jit
def _kept_slots(merged_tokens, index, r_alpha, protected, OTHERS: tl.constexpr):
    """Slot of each kept alpha token: the number of kept tokens before it."""
    tokens = side_tokens(index, protected, False)
    slots = protected + index
    for first in range(0, r_alpha, OTHERS):
        others = first + tl.arange(0, OTHERS)
        merged_token = tl.load(merged_tokens + others, mask=others < r_alpha, other=1 << 20)
        slots -= tl.sum((merged_token[None, :] < tokens[:, None]).to(tl.int32), 1)
    return slots


@triton.jit
def slots_kernel(
    alpha_merged, alpha_partner, beta_strength, beta_partner, merged_tokens, slots,
    tokens, alphas, betas, r, r_alpha, protected,
    BIDIRECTIONAL: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """slots (B N) of a tile of tokens, from the partners on both sides.

    Merged beta tokens are appended to `merged_tokens` (B r).
    """
    image = tl.program_id(1).to(tl.int64)
    alpha_merged += image * alphas
    merged_tokens += image * r
    beta_strength += image * betas
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    odd = token % 2 == 1
    unprotected = (token >= protected) & (token < tokens)
    index = tl.where(odd, token - (protected + 1 - protected % 2), token - (protected + protected % 2)) // 2
    is_alpha = unprotected & (odd == 0)
    merged = is_alpha & (tl.load(alpha_merged + index, mask=is_alpha, other=0) != 0)
    # a merged alpha token shares the slot of its beta token
    beta = tl.where(odd, index, tl.load(alpha_partner + image * alphas + index, mask=merged, other=0))
    in_beta = (unprotected & odd) | merged
    beta_merged = token < 0
    destination = index
    beta_slot = beta + protected + alphas - r_alpha
    if BIDIRECTIONAL:
        strength = tl.load(beta_strength + beta, mask=in_beta, other=0.0)
        rank = tl.zeros([BLOCK], tl.int32)
        for first in range(0, betas, OTHERS):
            others = first + tl.arange(0, OTHERS)
            values = tl.load(beta_strength + others, mask=others < betas, other=float("-inf"))
            rank += _count_ahead(values, others, strength, beta)
        beta_merged = in_beta & (rank < r - r_alpha)
        destination = tl.load(beta_partner + image * betas + beta, mask=beta_merged, other=0)
        beta_slot = rank + protected + alphas - r
        tl.store(merged_tokens + r_alpha + rank, token, mask=beta_merged & odd)
    alpha = tl.where(beta_merged, destination, index)
    alpha_slot = _kept_slots(merged_tokens, alpha, r_alpha, protected, OTHERS)
    slot = tl.where(in_beta & (beta_merged == 0), beta_slot, alpha_slot)
    slot = tl.where(token < protected, token, slot)
    tl.store(slots + image * tokens + token, slot.to(tl.int64), mask=token < tokens)


@triton.jit
def members_kernel(slots, merged_tokens, order, start, tokens, count, BLOCK: tl.constexpr, OTHERS: tl.constexpr):
    """order (B N): tokens sorted by slot; start (B M+1): where each slot, none of them empty, begins in `order`.

    A slot has one kept token, followed by those merged into it.
    """
    image = tl.program_id(1).to(tl.int64)
    r = tokens - count
    slots += image * tokens
    merged_tokens += image * r
    start += image * (count + 1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + token, mask=token < tokens, other=0).to(tl.int32)
    begin = slot
    offset = tl.zeros([BLOCK], tl.int32)
    merged = tl.zeros([BLOCK], tl.int32)
    for first in range(0, r, OTHERS):
        others = first + tl.arange(0, OTHERS)
        merged_token = tl.load(merged_tokens + others, mask=others < r, other=1 << 20)
        merged_slot = tl.load(slots + merged_token, mask=others < r, other=count).to(tl.int32)
        begin += tl.sum((merged_slot[None, :] < slot[:, None]).to(tl.int32), 1)
        same_slot = (merged_slot[None, :] == slot[:, None]) & (merged_token[None, :] <= token[:, None])
        offset += tl.sum(same_slot.to(tl.int32), 1)
        merged += tl.sum((merged_token[None, :] == token[:, None]).to(tl.int32), 1)
    offset = tl.where(merged > 0, offset, 0)
    tl.store(order + image * tokens + begin + offset, token, mask=token < tokens)
    tl.store(start + slot, begin, mask=(token < tokens) & (merged == 0))
    tl.store(start + count, tokens)
