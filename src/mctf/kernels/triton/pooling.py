"""Means and sums over the slots of an assignment: Triton versions of `Assignment.pool` and `Assignment.sum`.

A program serves one slot of one image, or some channels of it, and loops over its tokens. Most slots have one token,
so rows are read about once and written once.

Axes: B images, N tokens, M slots, C channels.
"""

import triton
import triton.language as tl


@triton.jit
def _load_size(sizes, token, valid, HAS_SIZES: tl.constexpr):
    """Size of each token, 1 without sizes; 0 where a token is not valid."""
    if HAS_SIZES:
        size = tl.load(sizes + token, mask=valid, other=0.0)
    else:
        size = valid.to(tl.float32)
    return size


@triton.jit
def _joint_weight(weights, size, token, valid, HAS_WEIGHTS: tl.constexpr, BY_SIZE: tl.constexpr):
    """Weight of each token in its slot; 0 where a token is not valid."""
    weight = size if BY_SIZE else valid.to(tl.float32)
    if HAS_WEIGHTS:
        weight *= tl.load(weights + token, mask=valid, other=0.0)
    return weight


@triton.jit
def pooling_kernel(
    x, y, weights, sizes, order, start, x_out, y_out, sizes_out, masses_out,
    tokens, count, x_channels, y_channels, x_b, x_n, y_b, y_n,
    HAS_Y: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_SIZES: tl.constexpr, BY_SIZE: tl.constexpr,
    KEEP_NORM: tl.constexpr, TRAIN: tl.constexpr, MEMBERS: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
):  # fmt: skip
    """x_out[s] = sum of w_i x_i / sum of w_i over the tokens of slot s; y_out likewise; sizes_out[s] = sum of sizes.

    w_i is a token's weight, times its size BY_SIZE; absent weights and sizes are 1. A slot whose weights sum to 0 gets
    the mean 0. To TRAIN, masses_out[s] = sum of w_i. A program takes X channels of x and Y of y, and MEMBERS tokens at
    a time. To KEEP_NORM, x_out has the weighted mean of its members' norms; X are then all channels.
    """
    image = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0)
    begin = tl.load(start + image * (count + 1) + slot)
    end = tl.load(start + image * (count + 1) + slot + 1)
    x += image * x_b
    y += image * y_b
    order += image * tokens
    weights += image * tokens
    sizes += image * tokens
    x_column, y_column = (tl.program_id(2) * X + tl.arange(0, X), tl.program_id(2) * Y + tl.arange(0, Y))
    x_sum = tl.zeros([X], tl.float32)
    y_sum = tl.zeros([Y], tl.float32)
    mass = 0.0
    size = 0.0
    norm = 0.0
    # weights are relative to that of the first member: a token alone in its slot then stays bit-identical
    nonempty = begin < end
    first_token = tl.load(order + begin, mask=nonempty, other=0)
    first_size = _load_size(sizes, first_token, nonempty, HAS_SIZES)
    first = _joint_weight(weights, first_size, first_token, nonempty, HAS_WEIGHTS, BY_SIZE)
    first = tl.where(first == 0.0, 1.0, first)  # a dropped token has weight 0
    for member in range(begin, end, MEMBERS):
        position = member + tl.arange(0, MEMBERS)
        valid = position < end
        token = tl.load(order + position, mask=valid, other=0)
        member_size = _load_size(sizes, token, valid, HAS_SIZES)
        size += tl.sum(member_size, 0)
        weight = _joint_weight(weights, member_size, token, valid, HAS_WEIGHTS, BY_SIZE)
        weight = tl.where(weight == first, 1.0, weight / first)  # a GPU's fast division need not give exactly 1
        mass += tl.sum(weight, 0)
        keep = valid[:, None] & (x_column[None, :] < x_channels)
        rows = tl.load(x + token[:, None] * x_n + x_column[None, :], mask=keep, other=0.0)
        x_sum += tl.sum(weight[:, None] * rows.to(tl.float32), 0)
        if KEEP_NORM:
            squares = tl.sum(rows.to(tl.float32) * rows.to(tl.float32), 1)
            norm += tl.sum(weight * tl.sqrt(squares), 0)
        if HAS_Y:
            keep = valid[:, None] & (y_column[None, :] < y_channels)
            rows = tl.load(y + token[:, None] * y_n + y_column[None, :], mask=keep, other=0.0)
            y_sum += tl.sum(weight[:, None] * rows.to(tl.float32), 0)
    mass = tl.where(mass == 0.0, 1.0, mass)  # without members, or with weights of 0 only, the mean is 0
    target = image * count + slot
    x_mean = x_sum / mass
    if KEEP_NORM:
        own = tl.sqrt(tl.sum(x_mean * x_mean, 0))
        x_mean *= tl.where(end - begin > 1, norm / mass / tl.maximum(own, 1e-30), 1.0)  # a token alone stays as it is
    x_mean = x_mean.to(x_out.dtype.element_ty)
    tl.store(x_out + target * x_channels + x_column, x_mean, mask=x_column < x_channels)
    if HAS_Y:
        y_mean = (y_sum / mass).to(y_out.dtype.element_ty)
        tl.store(y_out + target * y_channels + y_column, y_mean, mask=y_column < y_channels)
    tl.store(sizes_out + target, size, mask=tl.program_id(2) == 0)
    if TRAIN:
        tl.store(masses_out + target, mass * first, mask=tl.program_id(2) == 0)


@triton.jit
def segment_sum_kernel(x, order, start, out, tokens, count, channels, x_b, x_n, X: tl.constexpr):
    """out[s] = sum of x_i over the tokens of slot s."""
    image = tl.program_id(1).to(tl.int64)
    slot = image * (count + 1) + tl.program_id(0)
    column = tl.arange(0, X)
    total = tl.zeros([X], tl.float32)
    for position in range(tl.load(start + slot), tl.load(start + slot + 1)):
        token = tl.load(order + image * tokens + position)
        total += tl.load(x + image * x_b + token * x_n + column, mask=column < channels, other=0.0).to(tl.float32)
    out += (image * count + tl.program_id(0)) * channels
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < channels)
