"""Gradients of attention, whose weights are computed again, tile by tile, from the normaliser of each row.

With A the attention weights, G the gradient of the context and delta_i the sum over channels of G_i * context_i,

    dV = A^T G        dS = A * (G V^T - delta)        dQ = scale dS K        dK = scale dS^T Q

One kernel holds a tile of rows and walks over the keys, the other holds a tile of keys and walks over the rows. Each
computes its tiles of A with the side it holds in front, so that they are ready in registers for the products that
follow. One kernel for both saves two products of seven, but must turn tiles around in shared memory and holds so many
sums that few programs fit a multiprocessor. No two programs write the same number: equal inputs give equal gradients.

Axes: B images, H heads, N tokens, M slots, D channels a head.
"""

import triton
import triton.language as tl

from .numbers_triton import single
from .tiles_triton import load_near_rows, load_rows, load_sizes, load_values, store_rows


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
