"""Scores, both matching directions and output slots of one image in one program: Triton version of `core.matching`.

The score matrix (at most 128 x 128) stays in the program's registers. Ranks come from counting larger values pair by
pair: at this size that beats a sort, and ties are broken by index as in the plain version. An exchange between threads
synchronizes all of them and costs more than the counting, so exchanges are few.

Axes: B images, N tokens, Na and Nb unprotected tokens in even and odd positions (alpha and beta), C channels.
"""

import triton
import triton.language as tl

from ._common import to_float32

_LAST: tl.constexpr = tl.constexpr(1 << 30)  # a sort key after all others


@triton.jit
def _rank(values, index):
    """Rank of each value from large to small, equal values by index; needs `values` finite or -inf."""
    mine, other = values[:, None], values[None, :]
    ahead = (other > mine) | ((other == mine) & (index[None, :] < index[:, None]))
    return tl.sum(ahead.to(tl.int32), 1)


@triton.jit
def side_tokens(index, protected, ODD: tl.constexpr):
    """The tokens with these indices on the beta (ODD) or alpha side."""
    if ODD:
        tokens = protected + 1 - protected % 2 + 2 * index
    else:
        tokens = protected + protected % 2 + 2 * index
    return tokens


@triton.jit
def total_received(parts, tokens, token, valid, PARTS: tl.constexpr):
    """Informativeness of some tokens, the sum of its PARTS (G N), above 0; 1 where a token is not valid."""
    total = tl.load(parts + token, mask=valid, other=1.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * tokens + token, mask=valid, other=0.0)
    return tl.maximum(total, 1e-30)


@triton.jit
def _token_factor(informativeness, sizes, token, valid, tau_info, tau_size, HAS_SIZES: tl.constexpr):
    """a^-tau_info * s^-tau_size of some tokens."""
    exponent = -tau_info * tl.log2(informativeness)
    if HAS_SIZES:
        exponent -= tau_size * tl.log2(tl.maximum(tl.load(sizes + token, mask=valid, other=1.0), 1e-30))
    return tl.exp2(exponent)


@triton.jit
def _score(product, alpha_norm, beta_norm, alpha_factor, beta_factor, tau_sim, POWER: tl.constexpr):
    """Scores of pairs from their inner products, their norms and the factor of each token; 0 in place of NaN.

    A division takes ten instructions, so norms are inverted per token; halved, (1 + cosine) / 2 is one multiply-add.
    """
    alpha_inverse, beta_inverse = 0.5 / tl.maximum(alpha_norm, 1e-30), 1.0 / tl.maximum(beta_norm, 1e-30)
    score = product * alpha_inverse[:, None] * beta_inverse[None, :] + 0.5
    if POWER:
        score = tl.exp2(tau_sim * tl.log2(tl.maximum(score, 1e-30)))
    return tl.maximum(score * (alpha_factor[:, None] * beta_factor[None, :]), 0.0)


@triton.jit
def pair_scores(
    x, norms, alpha_info, beta_info, sizes, alpha_tokens, beta_tokens, is_alpha, is_beta,
    channels, tau_sim, tau_info, tau_size, x_n,
    HAS_SIZES: tl.constexpr, POWER: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of some pairs of one image, A B; -inf beyond the last tokens, and for no other pair."""
    # before the long loop, whose loads hide the latency of these
    alpha_factor = _token_factor(alpha_info, sizes, alpha_tokens, is_alpha, tau_info, tau_size, HAS_SIZES)
    beta_factor = _token_factor(beta_info, sizes, beta_tokens, is_beta, tau_info, tau_size, HAS_SIZES)
    alpha_norm = tl.load(norms + alpha_tokens, mask=is_alpha, other=1.0)
    beta_norm = tl.load(norms + beta_tokens, mask=is_beta, other=1.0)
    product = tl.zeros([A, B], tl.float32)
    for first in range(0, channels, CHUNK):
        column = first + tl.arange(0, CHUNK)
        inside = column[None, :] < channels
        xa = tl.load(x + alpha_tokens[:, None] * x_n + column[None, :], mask=is_alpha[:, None] & inside, other=0.0)
        xb = tl.load(x + beta_tokens[:, None] * x_n + column[None, :], mask=is_beta[:, None] & inside, other=0.0)
        product = tl.dot(xa, tl.trans(xb), product, input_precision=PRECISION)
    score = _score(product, alpha_norm, beta_norm, alpha_factor, beta_factor, tau_sim, POWER)
    return tl.where(is_alpha[:, None] & is_beta[None, :], score, float("-inf"))


@triton.jit
def max_with_index(scores, index, AXIS: tl.constexpr):
    """The largest score along an axis, and the first index there that has it.

    Two reductions of numbers are less work than one of pairs.
    """
    top = tl.max(scores, AXIS)
    is_top = scores == tl.expand_dims(top, AXIS)
    return top, tl.min(tl.where(is_top, tl.expand_dims(index, 1 - AXIS), 1 << 20), AXIS)


@triton.jit
def _sort_key(slot, merged, token):
    """What orders the tokens by slot: the slot, whether the token is merged into another, and its index."""
    return (slot * 2 + merged.to(tl.int32)) * 512 + token


@triton.jit
def _store_slots(
    slots, order, start, token, valid, sort_key, merged_alpha, merged_beta, BIDIRECTIONAL: tl.constexpr
):  # fmt: skip
    """Slots of some tokens, their positions in the order by slots, and where the slots begin in it.

    A slot has one kept token, followed by those merged into it. So the sort keys of a token and of all merged tokens
    give its position.
    """
    ahead = (merged_alpha[None, :] < sort_key[:, None]).to(tl.int32)
    if BIDIRECTIONAL:
        ahead += (merged_beta[None, :] < sort_key[:, None]).to(tl.int32)
    slot, merged = sort_key // 1024, sort_key // 512 % 2
    position = slot + merged + tl.sum(ahead, 1)
    tl.store(slots + token, slot.to(tl.int64), mask=valid)
    tl.store(order + position, token, mask=valid)
    tl.store(start + slot, position, mask=valid & (merged == 0))


@triton.jit
def matching_kernel(
    x, norms, received, sizes, slots, order, start, informativeness,
    tokens, channels, alphas, r, r_alpha, protected, tau_sim, tau_info, tau_size, x_b, x_n,
    HAS_SIZES: tl.constexpr, POWER: tl.constexpr, BIDIRECTIONAL: tl.constexpr, PARTS: tl.constexpr,
    SIDE: tl.constexpr, CHUNK: tl.constexpr, PROTECTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """slots (B N); order (B N): tokens sorted by slot; start (B M+1): where each slot begins in `order`.

    Also informativeness (B N), the sum of received (B G N) over its PARTS.
    SIDE: a power of two, at least as large as the alpha and the beta side.
    """
    tau_sim, tau_info, tau_size = to_float32(tau_sim), to_float32(tau_info), to_float32(tau_size)
    image = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIDE)
    alpha_tokens, beta_tokens = side_tokens(index, protected, False), side_tokens(index, protected, True)
    is_alpha, is_beta = alpha_tokens < tokens, beta_tokens < tokens

    # 1. informativeness, and scores of all pairs
    received += image * PARTS * tokens
    informativeness += image * tokens
    alpha_info = total_received(received, tokens, alpha_tokens, is_alpha, PARTS)
    beta_info = total_received(received, tokens, beta_tokens, is_beta, PARTS)
    tl.store(informativeness + alpha_tokens, alpha_info, mask=is_alpha)
    tl.store(informativeness + beta_tokens, beta_info, mask=is_beta)
    scores = pair_scores(
        x + image * x_b, norms + image * tokens, alpha_info, beta_info, sizes + image * tokens,
        alpha_tokens, beta_tokens, is_alpha, is_beta, channels, tau_sim, tau_info, tau_size, x_n,
        HAS_SIZES, POWER, SIDE, SIDE, CHUNK, PRECISION,
    )  # fmt: skip

    # 2. alpha tokens merged into beta
    strength, target = max_with_index(scores, index, 1)
    alpha_is_merged = is_alpha & (_rank(strength, index) < r_alpha)
    kept_slots = protected + tl.cumsum((is_alpha & (alpha_is_merged == 0)).to(tl.int32), 0) - 1

    # 3. beta tokens merged into the kept alpha tokens; the kept ones by falling strength
    beta_is_merged = index < 0
    beta_slots = protected + alphas - r_alpha + index
    if BIDIRECTIONAL:
        strength, destination = max_with_index(tl.where(alpha_is_merged[:, None], float("-inf"), scores), index, 0)
        rank = _rank(strength, index)
        beta_is_merged = rank < r - r_alpha
        beta_slots = tl.where(beta_is_merged, tl.gather(kept_slots, destination, 0), rank + protected + alphas - r)
    alpha_slots = tl.where(alpha_is_merged, tl.gather(beta_slots, target, 0), kept_slots)

    # 4. tokens sorted by slot
    slots += image * tokens
    order += image * tokens
    start += image * (tokens - r + 1)
    alpha_sort_keys = _sort_key(alpha_slots, alpha_is_merged, alpha_tokens)
    beta_sort_keys = _sort_key(beta_slots, beta_is_merged, beta_tokens)
    merged_alpha = tl.where(alpha_is_merged, alpha_sort_keys, _LAST)
    merged_beta = tl.where(beta_is_merged, beta_sort_keys, _LAST)
    _store_slots(slots, order, start, alpha_tokens, is_alpha, alpha_sort_keys, merged_alpha, merged_beta, BIDIRECTIONAL)
    _store_slots(slots, order, start, beta_tokens, is_beta, beta_sort_keys, merged_alpha, merged_beta, BIDIRECTIONAL)
    first = tl.arange(0, PROTECTED)
    tl.store(slots + first, first.to(tl.int64), mask=first < protected)
    tl.store(order + first, first, mask=first < protected)
    tl.store(start + first, first, mask=first < protected)
    tl.store(start + tokens - r, tokens)
    info = total_received(received, tokens, first, first < protected, PARTS)
    tl.store(informativeness + first, info, mask=first < protected)
