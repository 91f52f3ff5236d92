"""Scores, both matching directions and output slots of one image in one program: Triton twin of `core.matching`.

The score matrix (at most 128 x 128) never leaves the program's registers. Ranks come from counting larger values pair
by pair: at this size that beats a sort, and equal values fall by index as in the plain version. Every exchange between
threads waits for all of them and costs more than the counting: the fewer, the better.

Axes: B images, N tokens, Na and Nb unprotected tokens in even and odd places, C channels.
"""

import triton
import triton.language as tl

from ._common import single

_LAST: tl.constexpr = tl.constexpr(1 << 30)  # an item behind all others


@triton.jit
def _rank(values, places):
    """Place of each value from large to small, equal values by index; needs `values` finite or -inf."""
    mine, other = values[:, None], values[None, :]
    ahead = (other > mine) | ((other == mine) & (places[None, :] < places[:, None]))
    return tl.sum(ahead.to(tl.int32), 1)


@triton.jit
def side_tokens(places, protected, ODD: tl.constexpr):
    """The tokens at these places of a side."""
    if ODD:
        tokens = protected + 1 - protected % 2 + 2 * places
    else:
        tokens = protected + protected % 2 + 2 * places
    return tokens


@triton.jit
def total_received(parts, tokens, where, keep, PARTS: tl.constexpr):
    """Informativeness of some tokens, the sum of its PARTS (G N), above 0; 1 beyond the last."""
    total = tl.load(parts + where, mask=keep, other=1.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * tokens + where, mask=keep, other=0.0)
    return tl.maximum(total, 1e-30)


@triton.jit
def _isolation(informativeness, sizes, where, keep, tau_info, tau_size, HAS_SIZES: tl.constexpr):
    """a^-tau_info * s^-tau_size of some tokens."""
    exponent = -tau_info * tl.log2(informativeness)
    if HAS_SIZES:
        exponent -= tau_size * tl.log2(tl.maximum(tl.load(sizes + where, mask=keep, other=1.0), 1e-30))
    return tl.exp2(exponent)


@triton.jit
def _score(product, alpha_length, beta_length, alpha_isolation, beta_isolation, tau_sim, POWER: tl.constexpr):
    """Attraction of pairs from their products, their lengths, and how isolated each token is; 0 if that is no number.

    A division is ten instructions, so lengths are inverted before they meet; halved, (1 + cosine) / 2 is one step.
    """
    alpha_inverse, beta_inverse = 0.5 / tl.maximum(alpha_length, 1e-30), 1.0 / tl.maximum(beta_length, 1e-30)
    score = product * alpha_inverse[:, None] * beta_inverse[None, :] + 0.5
    if POWER:
        score = tl.exp2(tau_sim * tl.log2(tl.maximum(score, 1e-30)))
    return tl.maximum(score * (alpha_isolation[:, None] * beta_isolation[None, :]), 0.0)


@triton.jit
def pair_scores(
    x, lengths, alpha_info, beta_info, sizes, alpha_tokens, beta_tokens, is_alpha, is_beta,
    channels, tau_sim, tau_info, tau_size, x_n,
    HAS_SIZES: tl.constexpr, POWER: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of some pairs of one image, A B; -inf beyond the last tokens, and for no other pair."""
    # before the long loop: its loads then hide the waiting for these
    alpha_isolation = _isolation(alpha_info, sizes, alpha_tokens, is_alpha, tau_info, tau_size, HAS_SIZES)
    beta_isolation = _isolation(beta_info, sizes, beta_tokens, is_beta, tau_info, tau_size, HAS_SIZES)
    alpha_length = tl.load(lengths + alpha_tokens, mask=is_alpha, other=1.0)
    beta_length = tl.load(lengths + beta_tokens, mask=is_beta, other=1.0)
    product = tl.zeros([A, B], tl.float32)
    for first in range(0, channels, CHUNK):
        column = first + tl.arange(0, CHUNK)
        inside = column[None, :] < channels
        xa = tl.load(x + alpha_tokens[:, None] * x_n + column[None, :], mask=is_alpha[:, None] & inside, other=0.0)
        xb = tl.load(x + beta_tokens[:, None] * x_n + column[None, :], mask=is_beta[:, None] & inside, other=0.0)
        product = tl.dot(xa, tl.trans(xb), product, input_precision=PRECISION)
    score = _score(product, alpha_length, beta_length, alpha_isolation, beta_isolation, tau_sim, POWER)
    return tl.where(is_alpha[:, None] & is_beta[None, :], score, float("-inf"))


@triton.jit
def best(scores, places, AXIS: tl.constexpr):
    """The largest score along an axis, and the first of the places there that has it.

    Two plain extremes are less work than one of pairs.
    """
    top = tl.max(scores, AXIS)
    has_it = scores == tl.expand_dims(top, AXIS)
    return top, tl.min(tl.where(has_it, tl.expand_dims(places, 1 - AXIS), 1 << 20), AXIS)


@triton.jit
def _item(slot, leaves, token):
    """All that decides a token's place in the order by slots: its slot, whether it left for it, and its number."""
    return (slot * 2 + leaves.to(tl.int32)) * 512 + token


@triton.jit
def _write(
    slots, order, start, token, keep, item, alpha_leavers, beta_leavers, BIDIRECTIONAL: tl.constexpr
):  # fmt: skip
    """Slots of some tokens, their places in the order by slots, and where the slots begin in it.

    A slot has one token that stays, then those that left for it. All is told by the items of the tokens and of leavers.
    """
    ahead = (alpha_leavers[None, :] < item[:, None]).to(tl.int32)
    if BIDIRECTIONAL:
        ahead += (beta_leavers[None, :] < item[:, None]).to(tl.int32)
    slot, leaves = item // 1024, item // 512 % 2
    at = slot + leaves + tl.sum(ahead, 1)
    tl.store(slots + token, slot.to(tl.int64), mask=keep)
    tl.store(order + at, token, mask=keep)
    tl.store(start + slot, at, mask=keep & (leaves == 0))


@triton.jit
def matching_kernel(
    x, lengths, received, sizes, slots, order, start, informativeness,
    tokens, channels, alphas, r, forth, protected, tau_sim, tau_info, tau_size, x_b, x_n,
    HAS_SIZES: tl.constexpr, POWER: tl.constexpr, BIDIRECTIONAL: tl.constexpr, PARTS: tl.constexpr,
    SIDE: tl.constexpr, CHUNK: tl.constexpr, PROTECTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """slots (B N); order (B N): tokens sorted by slot; start (B M+1): where each slot begins in `order`.

    Also informativeness (B N), the sum of received (B G N) over its PARTS.
    SIDE: a power of two, at least as large as the alpha and the beta side.
    """
    tau_sim, tau_info, tau_size = single(tau_sim), single(tau_info), single(tau_size)
    image = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, SIDE)
    alpha_tokens, beta_tokens = side_tokens(places, protected, False), side_tokens(places, protected, True)
    is_alpha, is_beta = alpha_tokens < tokens, beta_tokens < tokens

    # 1. informativeness, and pair_scores of every pair
    received += image * PARTS * tokens
    informativeness += image * tokens
    alpha_info = total_received(received, tokens, alpha_tokens, is_alpha, PARTS)
    beta_info = total_received(received, tokens, beta_tokens, is_beta, PARTS)
    tl.store(informativeness + alpha_tokens, alpha_info, mask=is_alpha)
    tl.store(informativeness + beta_tokens, beta_info, mask=is_beta)
    scores = pair_scores(
        x + image * x_b, lengths + image * tokens, alpha_info, beta_info, sizes + image * tokens,
        alpha_tokens, beta_tokens, is_alpha, is_beta, channels, tau_sim, tau_info, tau_size, x_n,
        HAS_SIZES, POWER, SIDE, SIDE, CHUNK, PRECISION,
    )  # fmt: skip

    # 2. alpha to beta
    strength, target = best(scores, places, 1)
    alpha_leaves = is_alpha & (_rank(strength, places) < forth)
    kept = protected + tl.cumsum((is_alpha & (alpha_leaves == 0)).to(tl.int32), 0) - 1

    # 3. beta to the remaining alpha, and the rest of beta by falling strength
    beta_leaves = places < 0
    beta_slots = protected + alphas - forth + places
    if BIDIRECTIONAL:
        strength, host = best(tl.where(alpha_leaves[:, None], float("-inf"), scores), places, 0)
        rank = _rank(strength, places)
        beta_leaves = rank < r - forth
        beta_slots = tl.where(beta_leaves, tl.gather(kept, host, 0), rank + protected + alphas - r)
    alpha_slots = tl.where(alpha_leaves, tl.gather(beta_slots, target, 0), kept)

    # 4. tokens sorted by slot
    slots += image * tokens
    order += image * tokens
    start += image * (tokens - r + 1)
    alpha_items = _item(alpha_slots, alpha_leaves, alpha_tokens)
    beta_items = _item(beta_slots, beta_leaves, beta_tokens)
    alpha_leavers = tl.where(alpha_leaves, alpha_items, _LAST)
    beta_leavers = tl.where(beta_leaves, beta_items, _LAST)
    _write(slots, order, start, alpha_tokens, is_alpha, alpha_items, alpha_leavers, beta_leavers, BIDIRECTIONAL)
    _write(slots, order, start, beta_tokens, is_beta, beta_items, alpha_leavers, beta_leavers, BIDIRECTIONAL)
    lead = tl.arange(0, PROTECTED)
    tl.store(slots + lead, lead.to(tl.int64), mask=lead < protected)
    tl.store(order + lead, lead, mask=lead < protected)
    tl.store(start + lead, lead, mask=lead < protected)
    tl.store(start + tokens - r, tokens)
    info = total_received(received, tokens, lead, lead < protected, PARTS)
    tl.store(informativeness + lead, info, mask=lead < protected)
