"""Attention, and the attention each token receives, in one pass over q and k: Triton twin of `core.attention`.

One program holds all keys of one head of one image, walks over the query rows, and needs no second pass: a row's
softmax is complete before it is used, so its weights can be added up by column on the way. Keys are held in one or
two tiles (181 = 128 + 64 rather than 256): exponentials are what the kernel spends its time on.

Axes: B images, H heads, N tokens, M slots, D channels a head.
"""

import triton
import triton.language as tl

from ._common import load_near_rows, load_rows, load_sizes, load_values, single, store_rows


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


# MERGED from mctf.kernels.triton.attention:
# Gradients of attention, whose weights are computed again, tile by tile, from the normaliser of each row.
#
# With A the attention weights, G the gradient of the context and delta_i the sum over channels of G_i * context_i,
#
#     dV = A^T G        dS = A * (G V^T - delta)        dQ = scale dS K        dK = scale dS^T Q
#
# One kernel holds a tile of rows and walks over the keys, the other holds a tile of keys and walks over the rows. Each
# computes its tiles of A with the side it holds in front, so that they are ready in registers for the products that
# follow. One kernel for both saves two products of seven, but must turn tiles around in shared memory and holds so many
# sums that few programs fit a multiprocessor. No two programs write the same number: equal inputs give equal gradients.
#
# Axes: B images, H heads, N tokens, M slots, D channels a head.


@triton.jit
def _weights_and_slopes(a, b, c, d, scale_log2, size, level, delta, PRECISION: tl.constexpr):
    """A tile of A, and of dS, the slope of the loss in the logits.

    Rows against keys with (a, b, c, d) = (queries, keys, G, values); keys against rows with a, b and c, d exchanged.
    Beyond the last key the size is 0, beyond the last row G and delta are: they add nothing to what is summed.
    """
    share = tl.dot(a, tl.trans(b), input_precision=PRECISION) * scale_log2 - level
    weights = tl.exp2(tl.minimum(share, 100.0)) * size  # of a key of size 0 it could be infinite
    slopes = weights * (tl.dot(c, tl.trans(d), input_precision=PRECISION) - delta)
    return weights.to(a.dtype), slopes.to(a.dtype)


@triton.jit
def query_gradient_kernel(
    q, k, v, sizes, slots, out, normaliser, out_grad, q_grad, deltas,
    tokens, heads, scale, scale_log2,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, grad_b, grad_n,
    HAS_SIZES: tl.constexpr, SPREAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of one head of one image: gradient of the queries (B N (H D)) and deltas (B H N)."""
    scale, scale_log2 = single(scale), single(scale_log2)
    tiles = tl.cdiv(tokens, ROWS)
    program = (tl.program_id(0) // tiles).to(tl.int64)
    image, head = program // heads, program % heads
    q += image * q_b + head * q_h
    k += image * k_b + head * k_h
    v += image * v_b + head * v_h
    out += (image * tokens * heads + head) * DIM
    out_grad += image * grad_b + head * DIM
    sizes += image * tokens
    slots += image * tokens
    channels = tl.arange(0, D)
    rows = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)

    query = load_rows(q, rows, channels, q_n, tokens, D, DIM)
    grad = load_rows(out_grad, rows, channels, grad_n, tokens, D, DIM)
    context = load_rows(out, rows, channels, heads * DIM, tokens, D, DIM)
    delta = tl.sum(grad.to(tl.float32) * context.to(tl.float32), 1)
    tl.store(deltas + program * tokens + rows, delta, mask=rows < tokens)
    level = tl.load(normaliser + program * tokens + rows, mask=rows < tokens, other=0.0)
    to_query = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        key = load_near_rows(k, keys, channels, k_n, tokens, D, DIM)
        value = load_values(v, slots, keys, channels, v_n, tokens, SPREAD, D, DIM)
        size = load_sizes(sizes, keys, tokens, HAS_SIZES)[None, :]
        _, slopes = _weights_and_slopes(
            query, key, grad, value, scale_log2, size, level[:, None], delta[:, None], PRECISION
        )
        to_query = tl.dot(slopes, key, to_query, input_precision=PRECISION)
    store_rows(q_grad, to_query * scale, image, head, rows, channels, tokens, heads, D, DIM)


@triton.jit
def key_value_gradient_kernel(
    q, k, v, sizes, slots, normaliser, deltas, out_grad, k_grad, v_grad,
    tokens, heads, scale, scale_log2,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, grad_b, grad_n,
    HAS_SIZES: tl.constexpr, SPREAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some keys of one head of one image: gradients of keys and of values (one row a key), both B N (H D)."""
    scale, scale_log2 = single(scale), single(scale_log2)
    tiles = tl.cdiv(tokens, KEYS)
    program = (tl.program_id(0) // tiles).to(tl.int64)
    image, head = program // heads, program % heads
    q += image * q_b + head * q_h
    k += image * k_b + head * k_h
    v += image * v_b + head * v_h
    out_grad += image * grad_b + head * DIM
    normaliser += program * tokens
    deltas += program * tokens
    channels = tl.arange(0, D)
    keys = (tl.program_id(0) % tiles) * KEYS + tl.arange(0, KEYS)

    key = load_near_rows(k, keys, channels, k_n, tokens, D, DIM)
    value = load_values(v, slots + image * tokens, keys, channels, v_n, tokens, SPREAD, D, DIM)
    size = load_sizes(sizes + image * tokens, keys, tokens, HAS_SIZES)[:, None]
    to_key = tl.zeros([KEYS, D], tl.float32)
    to_value = tl.zeros([KEYS, D], tl.float32)
    for start in range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        query = load_rows(q, rows, channels, q_n, tokens, D, DIM)
        grad = load_rows(out_grad, rows, channels, grad_n, tokens, D, DIM)
        level = tl.load(normaliser + rows, mask=rows < tokens, other=0.0)[None, :]
        delta = tl.load(deltas + rows, mask=rows < tokens, other=0.0)[None, :]
        weights, slopes = _weights_and_slopes(key, query, value, grad, scale_log2, size, level, delta, PRECISION)
        to_value = tl.dot(weights, grad, to_value, input_precision=PRECISION)
        to_key = tl.dot(slopes, query, to_key, input_precision=PRECISION)
    store_rows(k_grad, to_key * scale, image, head, keys, channels, tokens, heads, D, DIM)
    store_rows(v_grad, to_value, image, head, keys, channels, tokens, heads, D, DIM)
