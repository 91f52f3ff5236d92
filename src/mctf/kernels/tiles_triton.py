"""Tiles of queries, keys and values in and out of memory, for the attention kernels.

Axes: B images, H heads, N tokens, M slots, D channels a head.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(pointer, rows, channels, row_stride, count, D: tl.constexpr, DIM: tl.constexpr):
    """A tile of rows, 0 beyond the last row or channel."""
    keep = rows[:, None] < count
    if D != DIM:
        keep = keep & (channels[None, :] < DIM)
    return tl.load(pointer + rows[:, None] * row_stride + channels[None, :], mask=keep, other=0.0)


@triton.jit
def load_bias(sizes_pointer, rows, count, HAS_SIZES: tl.constexpr):
    """log2(size) of each key, -inf beyond the last: B N."""
    if HAS_SIZES:
        bias = tl.log2(tl.load(sizes_pointer + rows, mask=rows < count, other=1.0))
    else:
        bias = tl.zeros(rows.shape, tl.float32)
    return tl.where(rows < count, bias, float("-inf"))


@triton.jit
def load_values(
    pointer, slots_pointer, rows, channels, row_stride, count, SPREAD: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr
):
    """Values of a tile of keys; spread values are read through the slot of each key."""
    source = rows
    if SPREAD:
        source = tl.load(slots_pointer + rows, mask=rows < count, other=0)
    keep = rows[:, None] < count
    if D != DIM:
        keep = keep & (channels[None, :] < DIM)
    return tl.load(pointer + source[:, None] * row_stride + channels[None, :], mask=keep, other=0.0)


@triton.jit
def store_rows(out, tile, image, head, rows, channels, tokens, heads, D: tl.constexpr, DIM: tl.constexpr):
    """A tile of rows of one head into B N (H D)."""
    keep = rows[:, None] < tokens
    if D != DIM:
        keep = keep & (channels[None, :] < DIM)
    target = out + ((image * tokens + rows[:, None]) * heads + head) * DIM + channels[None, :]
    tl.store(target, tile.to(out.dtype.element_ty), mask=keep)


@triton.jit
def load_sizes(sizes_pointer, keys, tokens, HAS_SIZES: tl.constexpr):
    """How often each key counts: its size, 1 without sizes, 0 beyond the last."""
    if HAS_SIZES:
        size = tl.load(sizes_pointer + keys, mask=keys < tokens, other=0.0)
    else:
        size = (keys < tokens).to(tl.float32)
    return size
