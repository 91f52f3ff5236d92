"""Scores, both matching directions and output slots of one image in one program: Triton twin of `core.matching`.

The score matrix (at most 128 x 128) never leaves the program's registers, unless others have made it (SCORED). Ranks
come from counting larger values pair by pair: at this size that beats a sort, and equal values fall by index as in the
plain version.

Axes: B images, N tokens, Na and Nb unprotected tokens in even and odd places, C channels.
"""

import triton
import triton.language as tl

from .numbers_triton import single


@triton.jit
def _rank(values, places):
    """Place of each value from large to small, equal values by index; needs `values` finite or -inf."""
    mine, other = values[:, None], values[None, :]
    ahead = (other > mine) | ((other == mine) & (places[None, :] < places[:, None]))
    return tl.sum(ahead.to(tl.int32), 1)


@triton.jit
def _look_up(table, index, places):
    """table[index] for vectors, by comparing every pair."""
    return tl.sum(tl.where(index[:, None] == places[None, :], table[None, :], 0), 1)


@triton.jit
def _count_before(gone, slots, tie):
    """For each token, how many leavers went to an earlier slot, or to the same one where `tie` holds."""
    before = (gone[None, :] < slots[:, None]) | ((gone[None, :] == slots[:, None]) & tie)
    return tl.sum(before.to(tl.int32), 1)


@triton.jit
def _isolation(informativeness, sizes, where, keep, tau_info, tau_size, HAS_SIZES: tl.constexpr):
    """a^-tau_info * s^-tau_size of some tokens."""
    exponent = -tau_info * tl.log2(tl.maximum(tl.load(informativeness + where, mask=keep, other=1.0), 1e-30))
    if HAS_SIZES:
        exponent -= tau_size * tl.log2(tl.load(sizes + where, mask=keep, other=1.0))
    return tl.exp2(exponent)


@triton.jit
def _score(product, alpha_square, beta_square, alpha_isolation, beta_isolation, tau_sim, POWER: tl.constexpr):
    """Attraction of pairs from their products, the squares of their lengths, and how isolated each token is."""
    lengths = tl.sqrt(alpha_square)[:, None] * tl.sqrt(beta_square)[None, :]
    score = (product / tl.maximum(lengths, 1e-30) + 1.0) / 2.0
    if POWER:
        score = tl.exp2(tau_sim * tl.log2(tl.maximum(score, 1e-30)))
    return score * (alpha_isolation[:, None] * beta_isolation[None, :])


@triton.jit
def _attraction(
    x, informativeness, sizes, alpha_tokens, beta_tokens, is_alpha, is_beta,
    channels, tau_sim, tau_info, tau_size, x_n,
    HAS_SIZES: tl.constexpr, POWER: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of all pairs of one image, A B."""
    product = tl.zeros([A, B], tl.float32)
    alpha_square, beta_square = tl.zeros([A], tl.float32), tl.zeros([B], tl.float32)
    for first in range(0, channels, CHUNK):
        column = first + tl.arange(0, CHUNK)
        inside = column[None, :] < channels
        xa = tl.load(x + alpha_tokens[:, None] * x_n + column[None, :], mask=is_alpha[:, None] & inside, other=0.0)
        xb = tl.load(x + beta_tokens[:, None] * x_n + column[None, :], mask=is_beta[:, None] & inside, other=0.0)
        product = tl.dot(xa, tl.trans(xb), product, input_precision=PRECISION)
        alpha_square += tl.sum(xa.to(tl.float32) * xa.to(tl.float32), 1)
        beta_square += tl.sum(xb.to(tl.float32) * xb.to(tl.float32), 1)
    alpha_isolation = _isolation(informativeness, sizes, alpha_tokens, is_alpha, tau_info, tau_size, HAS_SIZES)
    beta_isolation = _isolation(informativeness, sizes, beta_tokens, is_beta, tau_info, tau_size, HAS_SIZES)
    return _score(product, alpha_square, beta_square, alpha_isolation, beta_isolation, tau_sim, POWER)


@triton.jit
def matching_kernel(
    x, informativeness, sizes, scored, slots, order, start,
    tokens, channels, r, forth, protected, tau_sim, tau_info, tau_size, x_b, x_n,
    SCORED: tl.constexpr, HAS_SIZES: tl.constexpr, POWER: tl.constexpr, BIDIRECTIONAL: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr, PROTECTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """slots (B N); order (B N): tokens sorted by slot; start (B M+1): where each slot begins in `order`.

    SCORED: `scored` (B Na Nb) has the scores; else they are made here from x, informativeness and sizes.
    """
    tau_sim, tau_info, tau_size = single(tau_sim), single(tau_info), single(tau_size)
    image = tl.program_id(0).to(tl.int64)
    alpha_places, beta_places = tl.arange(0, A), tl.arange(0, B)
    alpha_tokens = protected + protected % 2 + 2 * alpha_places
    beta_tokens = protected + 1 - protected % 2 + 2 * beta_places
    is_alpha, is_beta = alpha_tokens < tokens, beta_tokens < tokens
    alphas = tl.sum(is_alpha.to(tl.int32), 0)

    # 1. attraction of every pair
    pairs = is_alpha[:, None] & is_beta[None, :]
    if SCORED:
        betas = tokens - protected - alphas
        where = (image * alphas + alpha_places[:, None]) * betas + beta_places[None, :]
        scores = tl.load(scored + where, mask=pairs, other=float("-inf"))
    else:
        scores = _attraction(
            x + image * x_b, informativeness + image * tokens, sizes + image * tokens,
            alpha_tokens, beta_tokens, is_alpha, is_beta, channels, tau_sim, tau_info, tau_size, x_n,
            HAS_SIZES, POWER, A, B, CHUNK, PRECISION,
        )  # fmt: skip
        scores = tl.where(pairs, scores, float("-inf"))

    # 2. alpha to beta
    strength, target = tl.max(scores, 1, return_indices=True, return_indices_tie_break_left=True)
    leaves = is_alpha & (_rank(strength, alpha_places) < forth)
    kept = protected + tl.cumsum((is_alpha & (leaves == 0)).to(tl.int32), 0) - 1

    # 3. beta to the remaining alpha
    beta_slots = protected + alphas - forth + beta_places
    beta_leaves = beta_places < 0
    if BIDIRECTIONAL:
        remaining = tl.where(leaves[:, None], float("-inf"), scores)
        strength, host = tl.max(remaining, 0, return_indices=True, return_indices_tie_break_left=True)
        rank = _rank(strength, beta_places)
        beta_leaves = rank < r - forth
        beta_slots = tl.where(beta_leaves, _look_up(kept, host, alpha_places), rank + protected + alphas - r)
    alpha_slots = tl.where(leaves, _look_up(beta_slots, target, beta_places), kept)

    # 4. tokens sorted by slot: every slot has one token that stays, then those that left for it, alpha before beta
    nowhere = 1 << 20
    alpha_gone = tl.where(leaves, alpha_slots, nowhere)
    beta_gone = tl.where(beta_leaves, beta_slots, nowhere)
    alpha_at = alpha_slots + leaves.to(tl.int32)
    alpha_at += _count_before(
        alpha_gone, alpha_slots, leaves[:, None] & (alpha_places[None, :] < alpha_places[:, None])
    )
    alpha_at += _count_before(beta_gone, alpha_slots, alpha_slots[:, None] < 0)
    beta_at = beta_slots + beta_leaves.to(tl.int32)
    beta_at += _count_before(alpha_gone, beta_slots, beta_leaves[:, None])
    earlier = beta_places[None, :] < beta_places[:, None]
    beta_at += _count_before(beta_gone, beta_slots, beta_leaves[:, None] & earlier)

    slots += image * tokens
    order += image * tokens
    start += image * (tokens - r + 1)
    tl.store(slots + alpha_tokens, alpha_slots.to(tl.int64), mask=is_alpha)
    tl.store(slots + beta_tokens, beta_slots.to(tl.int64), mask=is_beta)
    tl.store(order + alpha_at, alpha_tokens, mask=is_alpha)
    tl.store(order + beta_at, beta_tokens, mask=is_beta)
    tl.store(start + alpha_slots, alpha_at, mask=is_alpha & (leaves == 0))
    tl.store(start + beta_slots, beta_at, mask=is_beta & (beta_leaves == 0))
    lead = tl.arange(0, PROTECTED)
    tl.store(slots + lead, lead.to(tl.int64), mask=lead < protected)
    tl.store(order + lead, lead, mask=lead < protected)
    tl.store(start + lead, lead, mask=lead < protected)
    tl.store(start + tokens - r, tokens)
