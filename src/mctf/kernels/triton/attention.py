"""Attention, the attention each token receives, and gradients of attention: Triton versions of `core.attention`.

Forward, short sequences (`attention_kernel`): one program holds all keys of one head of one image and loops over the
query rows. A row's softmax is complete before it is used, so its weights are summed by column in the same pass. Keys
are held in one or two tiles (181 = 128 + 64 rather than 256): exponentials take most of the kernel's time.

Forward, long sequences: `long_attention_kernel` loops over the keys with an online softmax; `long_received_kernel`
computes the attention received in a second pass, from the log-sum-exp of each row.

Backward: the weights are recomputed tile by tile from the log-sum-exp of each row. With A the attention weights, G the
gradient of the context and delta_i the sum over channels of G_i * context_i,

    dV = A^T G        dS = A * (G V^T - delta)        dQ = scale dS K        dK = scale dS^T Q

One kernel holds a tile of rows and loops over the keys, the other holds a tile of keys and loops over the rows. Each
computes its tiles of A with the side it holds in front, so that they are ready in registers for the products that
follow. One kernel for both saves two products of seven, but must transpose tiles in shared memory and holds so many
sums that few programs fit a multiprocessor. No two programs write the same number: equal inputs give equal gradients.

A key of size s counts s times: exp(l + log s) = s exp(l). A key of size 0 is absent, whatever its logits. Where all
keys of an image have size 0, its context, attention received and gradients are 0.

Axes: B images, H heads, N tokens, M slots. A head has DIM channels; tiles hold D, the next power of two.
"""

import triton
import triton.language as tl

from ._common import load_clamped_rows, load_rows, load_sizes, load_values, store_rows, to_float32

_LOWEST: tl.constexpr = tl.constexpr(-3e38)  # below every logit, and finite: its difference from itself is 0


@triton.jit
def _split_into_rows(numbers, dtype: tl.constexpr):
    """A vector as the first two of 16 matrix rows: its values rounded to the dtype, and the rounding errors.

    Sums along a vector then are matrix products on the tensor cores. Summing 200 columns across threads would cost
    more than the rest of the kernel.
    """
    high = numbers.to(dtype)
    low = (numbers - high.to(tl.float32)).to(dtype)
    row = tl.arange(0, 16)[:, None]
    return tl.where(row == 0, high[None, :], tl.where(row == 1, low[None, :], 0.0).to(dtype))


@triton.jit
def _first_live_key(size, keys):
    """The first of the keys whose size is not 0; beyond all keys where there is none."""
    return tl.min(tl.where(size > 0.0, keys, 1 << 20), 0)


@triton.jit
def attention_kernel(
    q, k, v, sizes, slots, out, received, lse,
    tokens, heads, scale_log2, row_weight, first_row_weight,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    HAS_SIZES: tl.constexpr, UNPOOL: tl.constexpr, OUTPUT: tl.constexpr, RECEIVED: tl.constexpr, TRAIN: tl.constexpr,
    ROWS: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,
    D: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head of one image: out (B N H*D) and received (B H N), the weighted column sum of its attention.

    To TRAIN, also lse (B H N), log2 of each row's sum of exp(logit) * size, from which attention is recomputed.

    Sizes multiply the values and the softmax sums, which are few, not the logits, which are many. In place of a key of
    size 0, or beyond the last, a live key is read, whose logits do not exceed the maximum of the live ones: the first
    key, or the first live one where the first has size 0.
    """
    scale_log2 = to_float32(scale_log2)
    row_weight, first_row_weight = to_float32(row_weight), to_float32(first_row_weight) * tokens
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
    if T2 > 0:
        size2 = load_sizes(sizes, keys2, tokens, HAS_SIZES)
    if HAS_SIZES:
        first_size = tl.load(sizes)
    k1 = load_rows(k, tl.where(size1 > 0.0, keys1, 0), channels, k_n, tokens, D, DIM)
    if T2 > 0:
        k2 = load_rows(k, tl.where(size2 > 0.0, keys2, 0), channels, k_n, tokens, D, DIM)
    if OUTPUT:
        v1 = load_values(v, slots, keys1, channels, v_n, tokens, UNPOOL, D, DIM)
        if T2 > 0:
            v2 = load_values(v, slots, keys2, channels, v_n, tokens, UNPOOL, D, DIM)
    summed1 = size1
    if HAS_SIZES:  # noqa: SIM102 (one branch of the compiler, one of the kernel)
        # on an H200, this reduction in every program instead of a branch costs 2 to 3 % of the kernel's time
        if first_size == 0.0:
            live = _first_live_key(size1, keys1)
            if T2 > 0:
                live = tl.minimum(live, _first_live_key(size2, keys2))
            k1 = load_rows(k, tl.where(size1 > 0.0, keys1, live), channels, k_n, tokens, D, DIM)
            if T2 > 0:
                k2 = load_rows(k, tl.where(size2 > 0.0, keys2, live), channels, k_n, tokens, D, DIM)
            summed1 = tl.where(live < tokens, size1, 1.0)  # without live keys: 0 values over a sum above 0

    k1 = tl.trans(k1)
    counts1 = tl.trans(_split_into_rows(summed1, dtype))
    received1 = tl.zeros([16, T1], tl.float32)
    if OUTPUT:
        v1 = (v1 * size1[:, None]).to(dtype)
    if T2 > 0:
        k2 = tl.trans(k2)
        counts2 = tl.trans(_split_into_rows(size2, dtype))
        received2 = tl.zeros([16, T2], tl.float32)
        if OUTPUT:
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
            tl.store(lse + program * tokens + rows, top + tl.log2(mass), mask=rows < tokens)
        if OUTPUT:
            context = tl.dot(p1, v1, input_precision=PRECISION)
            if T2 > 0:
                context = tl.dot(p2, v2, context, input_precision=PRECISION)
            store_rows(out, context / mass[:, None], image, head, rows, channels, tokens, heads, D, DIM)
        if RECEIVED:
            share = tl.where(rows == 0, row_weight + first_row_weight, row_weight) / mass
            share = _split_into_rows(tl.where(rows < tokens, share, 0.0), dtype)
            received1 = tl.dot(share, p1, received1, input_precision=PRECISION)
            if T2 > 0:
                received2 = tl.dot(share, p2, received2, input_precision=PRECISION)

    if RECEIVED:
        received += program * tokens
        unit = 1.0 / (tokens * heads)
        tl.store(received + keys1, tl.sum(received1, 0) * size1 * unit, mask=keys1 < tokens)
        if T2 > 0:
            tl.store(received + keys2, tl.sum(received2, 0) * size2 * unit, mask=keys2 < tokens)


@triton.jit
def long_attention_kernel(
    q, k, v, sizes, slots, out, lse,
    tokens, heads, scale_log2,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    HAS_SIZES: tl.constexpr, UNPOOL: tl.constexpr, OUTPUT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of one head, keys tile by tile: out (B N H*D) and lse (B H N).

    lse is log2 of each row's sum of exp(logit) * size.
    """
    scale_log2 = to_float32(scale_log2)
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
    top = tl.full([ROWS], _LOWEST, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    context = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        key = tl.trans(load_clamped_rows(k, keys, channels, k_n, tokens, D, DIM))
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
            value = load_values(v, slots, keys, channels, v_n, tokens, UNPOOL, D, DIM)
            context = tl.dot(p.to(value.dtype), value, context * shrink[:, None], input_precision=PRECISION)
    if HAS_SIZES:
        mass = tl.where(mass == 0.0, 1.0, mass)  # no live key
    tl.store(lse + program * tokens + rows, top + tl.log2(mass), mask=rows < tokens)
    if OUTPUT:
        store_rows(out, context / mass[:, None], image, head, rows, channels, tokens, heads, D, DIM)


@triton.jit
def long_received_kernel(
    q, k, sizes, lse, received,
    tokens, heads, scale_log2, row_weight, first_row_weight,
    q_b, q_h, q_n, k_b, k_h, k_n,
    HAS_SIZES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention received by some keys of one head, query rows tile by tile: received (B H N)."""
    scale_log2 = to_float32(scale_log2)
    row_weight, first_row_weight = to_float32(row_weight), to_float32(first_row_weight) * tokens
    tiles = tl.cdiv(tokens, KEYS)
    program = (tl.program_id(0) // tiles).to(tl.int64)
    image, head = program // heads, program % heads
    q += image * q_b + head * q_h
    k += image * k_b + head * k_h
    lse += program * tokens
    channels = tl.arange(0, D)
    keys = (tl.program_id(0) % tiles) * KEYS + tl.arange(0, KEYS)
    key = load_rows(k, keys, channels, k_n, tokens, D, DIM)
    total = tl.zeros([KEYS], tl.float32)
    for start in range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        query = tl.trans(load_rows(q, rows, channels, q_n, tokens, D, DIM))
        row_lse = tl.load(lse + rows, mask=rows < tokens, other=0.0)
        p = tl.dot(key, query, input_precision=PRECISION) * scale_log2 - row_lse[None, :]
        weight = tl.where(rows == 0, row_weight + first_row_weight, row_weight)
        total += tl.sum(tl.exp2(p) * tl.where(rows < tokens, weight, 0.0)[None, :], 1)
    size = load_sizes(sizes + image * tokens, keys, tokens, HAS_SIZES)
    total = tl.where(size > 0.0, total * size / (tokens * heads), 0.0)
    tl.store(received + program * tokens + keys, total, mask=keys < tokens)


@triton.jit
def _weights_and_logit_grads(a, b, c, d, scale_log2, size, row_lse, delta, PRECISION: tl.constexpr):
    """A tile of A, and of dS, the gradient of the logits.

    Rows against keys with (a, b, c, d) = (queries, keys, G, values); keys against rows with a, b and c, d exchanged.
    Beyond the last key the size is 0, beyond the last row G and delta are: they add nothing to what is summed.
    """
    share = tl.dot(a, tl.trans(b), input_precision=PRECISION) * scale_log2 - row_lse
    weights = tl.exp2(tl.minimum(share, 100.0)) * size  # infinity times a size of 0 would be NaN
    logit_grads = weights * (tl.dot(c, tl.trans(d), input_precision=PRECISION) - delta)
    return weights.to(a.dtype), logit_grads.to(a.dtype)


@triton.jit
def query_gradient_kernel(
    q, k, v, sizes, slots, out, lse, out_grad, q_grad, deltas,
    tokens, heads, scale, scale_log2,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, grad_b, grad_n,
    HAS_SIZES: tl.constexpr, UNPOOL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of one head of one image: gradient of the queries (B N (H D)) and deltas (B H N)."""
    scale, scale_log2 = to_float32(scale), to_float32(scale_log2)
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
    row_lse = tl.load(lse + program * tokens + rows, mask=rows < tokens, other=0.0)
    q_sum = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, tokens, KEYS):
        keys = start + tl.arange(0, KEYS)
        key = load_clamped_rows(k, keys, channels, k_n, tokens, D, DIM)
        value = load_values(v, slots, keys, channels, v_n, tokens, UNPOOL, D, DIM)
        size = load_sizes(sizes, keys, tokens, HAS_SIZES)[None, :]
        _, logit_grads = _weights_and_logit_grads(
            query, key, grad, value, scale_log2, size, row_lse[:, None], delta[:, None], PRECISION
        )
        q_sum = tl.dot(logit_grads, key, q_sum, input_precision=PRECISION)
    store_rows(q_grad, q_sum * scale, image, head, rows, channels, tokens, heads, D, DIM)


@triton.jit
def key_value_gradient_kernel(
    q, k, v, sizes, slots, lse, deltas, out_grad, k_grad, v_grad,
    tokens, heads, scale, scale_log2,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, grad_b, grad_n,
    HAS_SIZES: tl.constexpr, UNPOOL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some keys of one head of one image: gradients of keys and of values (one row per key), both B N (H D)."""
    scale, scale_log2 = to_float32(scale), to_float32(scale_log2)
    tiles = tl.cdiv(tokens, KEYS)
    program = (tl.program_id(0) // tiles).to(tl.int64)
    image, head = program // heads, program % heads
    q += image * q_b + head * q_h
    k += image * k_b + head * k_h
    v += image * v_b + head * v_h
    out_grad += image * grad_b + head * DIM
    lse += program * tokens
    deltas += program * tokens
    channels = tl.arange(0, D)
    keys = (tl.program_id(0) % tiles) * KEYS + tl.arange(0, KEYS)

    key = load_clamped_rows(k, keys, channels, k_n, tokens, D, DIM)
    value = load_values(v, slots + image * tokens, keys, channels, v_n, tokens, UNPOOL, D, DIM)
    size = load_sizes(sizes + image * tokens, keys, tokens, HAS_SIZES)[:, None]
    k_sum = tl.zeros([KEYS, D], tl.float32)
    v_sum = tl.zeros([KEYS, D], tl.float32)
    for start in range(0, tokens, ROWS):
        rows = start + tl.arange(0, ROWS)
        query = load_rows(q, rows, channels, q_n, tokens, D, DIM)
        grad = load_rows(out_grad, rows, channels, grad_n, tokens, D, DIM)
        row_lse = tl.load(lse + rows, mask=rows < tokens, other=0.0)[None, :]
        delta = tl.load(deltas + rows, mask=rows < tokens, other=0.0)[None, :]
        weights, logit_grads = _weights_and_logit_grads(
            key, query, value, grad, scale_log2, size, row_lse, delta, PRECISION
        )
        v_sum = tl.dot(weights, grad, v_sum, input_precision=PRECISION)
        k_sum = tl.dot(logit_grads, query, k_sum, input_precision=PRECISION)
    store_rows(k_grad, k_sum * scale, image, head, keys, channels, tokens, heads, D, DIM)
    store_rows(v_grad, v_sum, image, head, keys, channels, tokens, heads, D, DIM)
