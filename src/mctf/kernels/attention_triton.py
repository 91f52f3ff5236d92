"""Attention, and the attention each token receives, in one pass over q and k: Triton twin of `core.attention`.

One program holds all keys of one head of one image, walks over the query rows, and needs no second pass: a row's
softmax is complete before it is used, so its weights can be added up by column on the way. Keys are held in one or
two tiles (181 = 128 + 64 rather than 256): exponentials are what the kernel spends its time on.

Axes: B images, H heads, N tokens, M slots, D channels a head.
"""

import triton
import triton.language as tl

from .numbers_triton import single
from .tiles_triton import load_near_rows, load_rows, load_sizes, load_values, store_rows


@triton.jit
def _first_lines(numbers, dtype: tl.constexpr):
    """A vector as the first rows of a matrix with 16: its value in the given dtype, and what that loses by rounding.

    Sums along a vector then are products. Adding 200 columns up across threads costs more than everything else; the
    tensor cores do it for nothing.
    """
    high = numbers.to(dtype)
    low = (numbers - high.to(tl.float32)).to(dtype)
    line = tl.arange(0, 16)[:, None]
    return tl.where(line == 0, high[None, :], tl.where(line == 1, low[None, :], 0.0).to(dtype))


@triton.jit
def attention_kernel(
    q, k, v, sizes, slots, out, received, normaliser,
    tokens, heads, scale_log2, row_weight, first_row_weight,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    HAS_SIZES: tl.constexpr, SPREAD: tl.constexpr, OUTPUT: tl.constexpr, LOOK: tl.constexpr, TRAIN: tl.constexpr,
    ROWS: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,
    D: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head of one image: out (B N H*D) and received (B H N), the weighted column sum of its attention.

    To train, also normaliser (B H N), log2 of each row's sum, from which attention can be computed again.

    A key of size s counts s times: exp(l + log s) = s exp(l). So sizes multiply the values and the softmax sum, which
    are few, and not the logits, which are many. A key of size 0, or beyond the last, is read as the first one, so that
    its logits are no larger than others.
    """
    scale_log2 = single(scale_log2)
    row_weight, first_row_weight = single(row_weight), single(first_row_weight) * tokens
    dtype: tl.constexpr = q.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    image, head = program // heads, program % heads
    q += image * q_b + head * q_h
    k += image * k_b + head * k_h
    v += image * v_b + head * v_h
    sizes += image * tokens
    slots += image * tokens
    channels = tl.arange(0, D)
    keys1 = tl.arange(0, T1)
    keys2 = T1 + tl.arange(0, T2 if T2 > 0 else 16)

    size1 = load_sizes(sizes, keys1, tokens, HAS_SIZES)
    k1 = tl.trans(load_rows(k, tl.where(size1 > 0.0, keys1, 0), channels, k_n, tokens, D, DIM))
    counts1 = tl.trans(_first_lines(size1, dtype))
    received1 = tl.zeros([16, T1], tl.float32)
    if OUTPUT:
        v1 = load_values(v, slots, keys1, channels, v_n, tokens, SPREAD, D, DIM)
        v1 = (v1 * size1[:, None]).to(dtype)
    if T2 > 0:
        size2 = load_sizes(sizes, keys2, tokens, HAS_SIZES)
        k2 = tl.trans(load_rows(k, tl.where(size2 > 0.0, keys2, 0), channels, k_n, tokens, D, DIM))
        counts2 = tl.trans(_first_lines(size2, dtype))
        received2 = tl.zeros([16, T2], tl.float32)
        if OUTPUT:
            v2 = load_values(v, slots, keys2, channels, v_n, tokens, SPREAD, D, DIM)
            v2 = (v2 * size2[:, None]).to(dtype)

    for start in range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        query = load_rows(q, rows, channels, q_n, tokens, D, DIM)
        p1 = tl.dot(query, k1, input_precision=PRECISION)
        top = tl.max(p1, 1)
        if T2 > 0:
            p2 = tl.dot(query, k2, input_precision=PRECISION)
            top = tl.maximum(top, tl.max(p2, 1))
        top *= scale_log2
        if T2 > 0:
            p2 = tl.exp2(p2 * scale_log2 - top[:, None]).to(dtype)
        p1 = tl.exp2(p1 * scale_log2 - top[:, None]).to(dtype)
        mass = tl.dot(p1, counts1, input_precision=PRECISION)
        if T2 > 0:
            mass = tl.dot(p2, counts2, mass, input_precision=PRECISION)
        mass = tl.sum(mass, 1)
        if TRAIN:
            tl.store(normaliser + program * tokens + rows, top + tl.log2(mass), mask=rows < tokens)
        if OUTPUT:
            context = tl.dot(p1, v1, input_precision=PRECISION)
            if T2 > 0:
                context = tl.dot(p2, v2, context, input_precision=PRECISION)
            store_rows(out, context / mass[:, None], image, head, rows, channels, tokens, heads, D, DIM)
        if LOOK:
            share = tl.where(rows == 0, row_weight + first_row_weight, row_weight) / mass
            share = _first_lines(tl.where(rows < tokens, share, 0.0), dtype)
            received1 = tl.dot(share, p1, received1, input_precision=PRECISION)
            if T2 > 0:
                received2 = tl.dot(share, p2, received2, input_precision=PRECISION)

    if LOOK:
        received += program * tokens
        unit = 1.0 / (tokens * heads)
        tl.store(received + keys1, tl.sum(received1, 0) * size1 * unit, mask=keys1 < tokens)
        if T2 > 0:
            tl.store(received + keys2, tl.sum(received2, 0) * size2 * unit, mask=keys2 < tokens)


@triton.jit
def long_attention_kernel(
    q, k, v, sizes, slots, out, normaliser,
    tokens, heads, scale_log2,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    HAS_SIZES: tl.constexpr, SPREAD: tl.constexpr, OUTPUT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of one head, keys tile by tile: out (B N H*D) and normaliser (B H N), log2 of each row's sum."""
    scale_log2 = single(scale_log2)
    tiles = tl.cdiv(tokens, ROWS)
    program = (tl.program_id(0) // tiles).to(tl.int64)
    image, head = program // heads, program % heads
    q += image * q_b + head * q_h
    k += image * k_b + head * k_h
    v += image * v_b + head * v_h
    sizes += image * tokens
    slots += image * tokens
    channels = tl.arange(0, D)
    rows = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    query = load_rows(q, rows, channels, q_n, tokens, D, DIM)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    context = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        key = tl.trans(load_near_rows(k, keys, channels, k_n, tokens, D, DIM))
        size = load_sizes(sizes, keys, tokens, HAS_SIZES)
        p = tl.dot(query, key, input_precision=PRECISION)
        if HAS_SIZES:
            p += tl.where(size > 0.0, 0.0, float("-inf"))[None, :]
        new_top = tl.maximum(top, tl.max(p, 1) * scale_log2)
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(p * scale_log2 - new_top[:, None]) * size[None, :]
        mass = mass * shrink + tl.sum(p, 1)
        top = new_top
        if OUTPUT:
            value = load_values(v, slots, keys, channels, v_n, tokens, SPREAD, D, DIM)
            context = tl.dot(p.to(value.dtype), value, context * shrink[:, None], input_precision=PRECISION)
    tl.store(normaliser + program * tokens + rows, top + tl.log2(mass), mask=rows < tokens)
    if OUTPUT:
        store_rows(out, context / mass[:, None], image, head, rows, channels, tokens, heads, D, DIM)


@triton.jit
def long_received_kernel(
    q, k, sizes, normaliser, received,
    tokens, heads, scale_log2, row_weight, first_row_weight,
    q_b, q_h, q_n, k_b, k_h, k_n,
    HAS_SIZES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention received by some keys of one head, query rows tile by tile: received (B H N)."""
    scale_log2 = single(scale_log2)
    row_weight, first_row_weight = single(row_weight), single(first_row_weight) * tokens
    tiles = tl.cdiv(tokens, KEYS)
    program = (tl.program_id(0) // tiles).to(tl.int64)
    image, head = program // heads, program % heads
    q += image * q_b + head * q_h
    k += image * k_b + head * k_h
    normaliser += program * tokens
    channels = tl.arange(0, D)
    keys = (tl.program_id(0) % tiles) * KEYS + tl.arange(0, KEYS)
    key = load_rows(k, keys, channels, k_n, tokens, D, DIM)
    total = tl.zeros([KEYS], tl.float32)
    for start in range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        query = tl.trans(load_rows(q, rows, channels, q_n, tokens, D, DIM))
        level = tl.load(normaliser + rows, mask=rows < tokens, other=0.0)
        p = tl.dot(key, query, input_precision=PRECISION) * scale_log2 - level[None, :]
        weight = tl.where(rows == 0, row_weight + first_row_weight, row_weight)
        total += tl.sum(tl.exp2(p) * tl.where(rows < tokens, weight, 0.0)[None, :], 1)
    size = load_sizes(sizes + image * tokens, keys, tokens, HAS_SIZES)
    total = tl.where(size > 0.0, total * size / (tokens * heads), 0.0)
    tl.store(received + program * tokens + keys, total, mask=keys < tokens)
