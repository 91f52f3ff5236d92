"""Scalars inside kernels."""

import triton
import triton.language as tl


@triton.jit
def single(number):
    """A scalar argument as float32.

    torch.compile passes Python floats as float64, which would lift all arithmetic they touch: attention took
    1,205 instead of 204 microseconds.
    """
    return (number + tl.zeros([], tl.float32)).to(tl.float32)


# MERGED from mctf.kernels.triton._common:
# Tiles of queries, keys and values in and out of memory, for the attention kernels.
#
# Axes: B images, H heads, N tokens, M slots, D channels a head.


@triton.jit
def load_rows(pointer, rows, channels, row_stride, count, D: tl.constexpr, DIM: tl.constexpr):
    """A tile of rows, 0 beyond the last row or channel."""
    keep = rows[:, None] < count
    if D != DIM:
        keep = keep & (channels[None, :] < DIM)
    return tl.load(pointer + rows[:, None] * row_stride + channels[None, :], mask=keep, other=0.0)


@triton.jit
def _load_each(pointer, rows, channels, row_stride, D: tl.constexpr, DIM: tl.constexpr):
    """Rows that all exist."""
    where = pointer + rows[:, None] * row_stride + channels[None, :]
    if D != DIM:
        tile = tl.load(where, mask=channels[None, :] < DIM, other=0.0)
    else:
        tile = tl.load(where)
    return tile


@triton.jit
def load_near_rows(pointer, rows, channels, row_stride, count, D: tl.constexpr, DIM: tl.constexpr):
    """A tile of rows; beyond the last row, the last one again.

    Their logits then are as large as others, and a weight of 0 is all it takes to make nothing of them: a column of
    weights can go from memory to where it is multiplied without a detour through other threads, one of -inf cannot.
    """
    return _load_each(pointer, tl.minimum(rows, count - 1), channels, row_stride, D, DIM)


@triton.jit
def load_values(
    pointer, slots_pointer, rows, channels, row_stride, count, SPREAD: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr
):
    """Values of a tile of keys; spread values are read through the slot of each key. Beyond the last, some value."""
    source = tl.minimum(rows, count - 1)
    if SPREAD:
        source = tl.load(slots_pointer + source)
    return _load_each(pointer, source, channels, row_stride, D, DIM)


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
