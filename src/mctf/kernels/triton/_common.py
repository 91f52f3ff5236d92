"""Scalars, and tiles of queries, keys and values, for the kernels.

Axes: B images, H heads, N tokens, M slots. A head has DIM channels; tiles hold D, the next power of two.
"""

import triton
import triton.language as tl


@triton.jit
def to_float32(number):
    """A scalar argument as float32.

    torch.compile passes Python floats as float64, which would promote all arithmetic they touch: attention took
    1,205 instead of 204 microseconds.
    """
    return (number + tl.zeros([], tl.float32)).to(tl.float32)


@triton.jit
def load_rows(pointer, rows, channels, row_stride, count, D: tl.constexpr, DIM: tl.constexpr):
    """A tile of rows, 0 beyond the last row or channel."""
    keep = rows[:, None] < count
    if D != DIM:
        keep = keep & (channels[None, :] < DIM)
    return tl.load(pointer + rows[:, None] * row_stride + channels[None, :], mask=keep, other=0.0)


@triton.jit
def _load_existing_rows(pointer, rows, channels, row_stride, D: tl.constexpr, DIM: tl.constexpr):
    """A tile of rows that all exist."""
    address = pointer + rows[:, None] * row_stride + channels[None, :]
    if D != DIM:
        tile = tl.load(address, mask=channels[None, :] < DIM, other=0.0)
    else:
        tile = tl.load(address)
    return tile


@triton.jit
def load_clamped_rows(pointer, rows, channels, row_stride, count, D: tl.constexpr, DIM: tl.constexpr):
    """A tile of rows; beyond the last row, the last one again.

    Logits of the repeated rows are as large as those of the last one, so a weight of 0 removes them. A column of
    weights goes straight from memory to where it is multiplied; a column of -inf would have to be exchanged between
    threads.
    """
    return _load_existing_rows(pointer, tl.minimum(rows, count - 1), channels, row_stride, D, DIM)


@triton.jit
def load_values(
    pointer, slots_pointer, rows, channels, row_stride, count, UNPOOL: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr
):
    """Values of a tile of keys; UNPOOL: read through the slot of each key. Beyond the last key, some value."""
    source = tl.minimum(rows, count - 1)
    if UNPOOL:
        source = tl.load(slots_pointer + source)
    return _load_existing_rows(pointer, source, channels, row_stride, D, DIM)


@triton.jit
def load_sizes(sizes_pointer, keys, tokens, HAS_SIZES: tl.constexpr):
    """Size of each key: 1 without sizes, 0 beyond the last key."""
    if HAS_SIZES:
        size = tl.load(sizes_pointer + keys, mask=keys < tokens, other=0.0)
    else:
        size = (keys < tokens).to(tl.float32)
    return size


@triton.jit
def store_rows(out, tile, image, head, rows, channels, tokens, heads, D: tl.constexpr, DIM: tl.constexpr):
    """A tile of rows of one head into B N (H D)."""
    keep = rows[:, None] < tokens
    if D != DIM:
        keep = keep & (channels[None, :] < DIM)
    target = out + ((image * tokens + rows[:, None]) * heads + head) * DIM + channels[None, :]
    tl.store(target, tile.to(out.dtype.element_ty), mask=keep)
