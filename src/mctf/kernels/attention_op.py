"""Attention and informativeness on the GPU: the `mctf::attention` operator and when it is used.

Its plain meaning is `core.attention.attend` and `core.attention.informativeness`; the kernels are in
`attention_triton`. Short sequences take one launch for both results, long ones two.

Axes: B images, H heads, N tokens, M slots, D channels a head.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .launch import launchable

_LONGEST_IN_ONE_PASS = 256  # tokens whose logits fit a program's registers
_SMALL_SHARED = 99 << 10  # bytes of shared memory every supported GPU gives a program
_LOG2_E = math.log2(math.e)


@torch.library.triton_op("mctf::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    sizes: Tensor | None,
    slots: Tensor | None,
    scale: float,
    row_weight: float,
    first_row_weight: float,
    look: bool,
) -> tuple[Tensor, Tensor]:
    """Context (B N H*D; empty without v) and received attention (B H N, float32; empty without `look`).

    received[b, h, j] = sum over rows i of A[b, h, i, j] * (row_weight + first_row_weight * [i == 0]) / (N H).
    With `slots` (B N), v has one row a slot and each key takes the value of its slot.
    """
    q, k = _channels_last(q), _channels_last(k)
    v = None if v is None else _channels_last(v)
    sizes = None if sizes is None else sizes.contiguous()
    slots = None if slots is None else slots.contiguous()
    out, received = _outputs(q, v is not None, look)
    work = _Work(q, k, v, sizes, slots, out, received, scale * _LOG2_E, row_weight, first_row_weight, look)
    (_launch_short if _fits_one_pass(q) else _launch_long)(work)
    return out, received


def _channels_last(x: Tensor) -> Tensor:
    """Kernels take any strides but that of the channels, which must lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _outputs(q: Tensor, output: bool, look: bool) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, channels = q.shape
    out = q.new_empty((batch, tokens, heads * channels) if output else (0,))
    received = q.new_empty((batch, heads, tokens) if look else (0,), dtype=torch.float32)
    return out, received


def fits(q: Tensor) -> bool:
    """Whether some kernel can hold heads of this width."""
    channels = q.shape[3]
    return channels <= 128 and (channels * q.element_size() <= 256 or _shared_memory(q.device) > _SMALL_SHARED)


def _fits_one_pass(q: Tensor) -> bool:
    """Whether the keys and values of a head, and the logits of some rows, fit a program."""
    tokens, channels = q.shape[2:]
    if tokens > _LONGEST_IN_ONE_PASS:
        return False
    keys, rows = sum(key_tiles(tokens)), _rows_at_once(tokens)
    numbers = keys * (2 * channels + 16) + rows * (keys + channels)
    return numbers * q.element_size() <= _shared_memory(q.device)


@torch.compiler.assume_constant_result
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 1 << 20  # the interpreter has no such limit
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


class _Work(NamedTuple):
    """The operator's arguments and outputs, on their way to a kernel."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    sizes: Tensor | None
    slots: Tensor | None
    out: Tensor
    received: Tensor
    scale_log2: float
    row_weight: float
    first_row_weight: float
    look: bool

    def or_query(self, tensor: Tensor | None) -> Tensor:
        """A kernel wants a pointer even where it will not read: the queries' will do."""
        return self.q if tensor is None else tensor

    def flags(self) -> dict[str, bool]:
        return {"HAS_SIZES": self.sizes is not None, "SPREAD": self.slots is not None, "OUTPUT": self.v is not None}


def _launch_short(work: _Work) -> None:
    from .attention_triton import attention_kernel

    q, k, values = work.q, work.k, work.or_query(work.v)
    batch, heads, tokens, _ = q.shape
    tiles = key_tiles(tokens)
    launchable(attention_kernel)[(batch * heads,)](
        q, k, values, work.or_query(work.sizes), work.or_query(work.slots), work.out, work.received,
        tokens, heads, work.scale_log2, work.row_weight, work.first_row_weight,
        *q.stride()[:3], *k.stride()[:3], *values.stride()[:3],
        LOOK=work.look, ROWS=_rows_at_once(tokens), T1=tiles[0], T2=tiles[1], **work.flags(), **_widths(q),
        num_warps=4, num_stages=1,
    )  # fmt: skip


def _launch_long(work: _Work) -> None:
    from .attention_triton import long_attention_kernel, long_received_kernel

    q, k, values = work.q, work.k, work.or_query(work.v)
    batch, heads, tokens, _ = q.shape
    tile = 64 if q.element_size() == 4 else 128
    warps = 8 if tile == 128 else 4
    normaliser = q.new_empty((batch, heads, tokens), dtype=torch.float32)
    grid = (math.ceil(tokens / tile), batch * heads)
    launchable(long_attention_kernel)[grid](
        q, k, values, work.or_query(work.sizes), work.or_query(work.slots), work.out, normaliser,
        tokens, heads, work.scale_log2, *q.stride()[:3], *k.stride()[:3], *values.stride()[:3],
        ROWS=tile, KEYS=64, **work.flags(), **_widths(q), num_warps=warps, num_stages=2,
    )  # fmt: skip
    if work.look:
        launchable(long_received_kernel)[grid](
            q, k, work.or_query(work.sizes), normaliser, work.received,
            tokens, heads, work.scale_log2, work.row_weight, work.first_row_weight, *q.stride()[:3], *k.stride()[:3],
            HAS_SIZES=work.sizes is not None, ROWS=64, KEYS=tile, **_widths(q), num_warps=warps, num_stages=2,
        )  # fmt: skip


def _widths(q: Tensor) -> dict[str, int | str]:
    """Head width, its power of two, and full float32 products for float32 tensors."""
    channels = q.shape[3]
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    return {"D": max(16, 1 << (channels - 1).bit_length()), "DIM": channels, "PRECISION": precision}


def _rows_at_once(tokens: int) -> int:
    return 64 if tokens > 32 else 32 if tokens > 16 else 16


def key_tiles(tokens: int) -> tuple[int, int]:
    """One or two tile sizes, powers of two, that cover up to 256 tokens with little to spare; 0 for none."""
    if tokens <= 128:
        return max(16, 1 << (tokens - 1).bit_length()), 0
    return 128, 64 if tokens <= 192 else 128
