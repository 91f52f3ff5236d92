"""Attention on the GPU: the operators `mctf::attention` and `mctf::attention_backward`.

`mctf::attention` computes `core.attention.attend` and `core.attention.informativeness`; `mctf::attention_backward`
computes what autograd derives from `attend`. The kernels are in `triton/attention.py`. Short sequences take one launch
for context and attention received, long ones two.

Axes: B images, H heads, N tokens, M slots, D channels per head.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MctfError
from . import pooling
from .launch import INTERPRETED, ceil_div, contiguous_channels, is_symbolic, launchable, next_power_of_2

_LOG2_E = math.log2(math.e)
_BASE_SHARED_MEMORY = 99 << 10  # bytes of shared memory that every supported GPU gives a program

# Which kernel: the short one needs few tokens and many heads.
MAX_SHORT_TOKENS = 256  # tokens whose logits fit a program's registers
MIN_SHORT_HEADS = 64  # heads of all images together: fewer, one program each, would leave most of a GPU idle


class Tile(NamedTuple):
    """Query rows and keys of a tile, and the number of loads in flight. All kernels run with 4 warps."""

    rows: int
    keys: int
    stages: int


# Tiles of `long_attention_kernel`. On an H200 in bfloat16, 64 images of 577 tokens and 12 heads took 270 us with large
# tiles and 326 us with small ones; one image took 9.6 us with small ones. Heads wider than 64 channels need more
# registers per row and key.
FILL_GPU = 264  # programs that keep a large GPU busy: two for each of 132 multiprocessors
LARGE_TILE, LARGE_TILE_WIDE_HEADS = Tile(128, 64, 3), Tile(128, 64, 2)
SMALL_TILE, SMALL_TILE_WIDE_HEADS = Tile(64, 128, 2), Tile(64, 64, 2)
ANY_TILE = Tile(64, 64, 2)  # for float32, and where the number of tokens is a variable of the graph
WIDE_HEAD = 64

# Tiles of `long_received_kernel`.
RECEIVED_TILE, RECEIVED_TILE_FLOAT32 = Tile(128, 64, 3), Tile(64, 64, 2)

# Tiles of the backward kernels: tokens a program holds, tokens it loops over at a time, loads in flight. The fastest
# of 21 shapes on an H200 in bfloat16 with 197 and 101 tokens. Up to 64 channels per head hardly a register is spilled,
# and the shared memory of every supported GPU suffices.
BACKWARD_TILE, BACKWARD_TILE_FLOAT32, BACKWARD_TILE_FLOAT32_WIDE_HEADS = (64, 32, 2), (64, 32, 1), (32, 32, 1)


@torch.library.triton_op("mctf::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    sizes: Tensor | None,
    slots: Tensor | None,
    order: Tensor | None,
    start: Tensor | None,
    scale: float,
    row_weight: float,
    first_row_weight: float,
    with_received: bool,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Context (B N H*D; empty without v), attention received and log-sum-exp (both B H N, float32).

    received[b, h, j] = sum over rows i of A[b, h, i, j] * (row_weight / N + first_row_weight * [i == 0]) / H;
    empty unless `with_received`.
    lse[b, h, i] = log2 of the sum over keys j of exp(logit[b, h, i, j]) * size[b, j]; the gradients need it; it
    may be empty unless `train`.

    q, k: B H N D; v: B H N D; scale is positive. sizes (B N): a key of size 0 is absent; where all keys of an image
    are, its outputs are 0.
    slots (B N): v has one row per slot (B H M D) and each key takes the value of its slot. To train, `order` and
    `start` (`Assignment.members`) list the keys of each slot.
    """
    from .triton.attention import attention_kernel, long_attention_kernel, long_received_kernel

    batch, heads, tokens, _ = q.shape
    q, k = contiguous_channels(q), contiguous_channels(k)
    is_short = _is_short(q)
    out, received, lse = _allocate_outputs(q, v is not None, with_received, train or not is_short)

    # a launch needs a pointer for every argument: q stands in for absent tensors, which the kernels do not read
    v_pointer = q if v is None else contiguous_channels(v)
    sizes_pointer = q if sizes is None else sizes.contiguous()
    slots_pointer = q if slots is None else slots.contiguous()
    strides = (*q.stride()[:3], *k.stride()[:3], *v_pointer.stride()[:3])
    flags = {"HAS_SIZES": sizes is not None, "UNPOOL": slots is not None, "OUTPUT": v is not None}
    head = _head_constants(q)
    scale_log2 = scale * _LOG2_E

    if is_short:
        first_tile, second_tile = key_tiles(tokens)
        launchable(attention_kernel)[(batch * heads,)](
            q, k, v_pointer, sizes_pointer, slots_pointer, out, received, lse,
            tokens, heads, scale_log2, row_weight, first_row_weight, *strides,
            RECEIVED=with_received, TRAIN=train, ROWS=_short_rows(tokens), T1=first_tile, T2=second_tile,
            **flags, **head, num_warps=4, num_stages=1,
        )  # fmt: skip
        return out, received, lse

    tile = long_tile(q)
    launchable(long_attention_kernel)[(ceil_div(tokens, tile.rows) * batch * heads,)](
        q, k, v_pointer, sizes_pointer, slots_pointer, out, lse, tokens, heads, scale_log2, *strides,
        ROWS=tile.rows, KEYS=tile.keys, **flags, **head, num_warps=4, num_stages=tile.stages,
    )  # fmt: skip
    if with_received:
        tile = RECEIVED_TILE_FLOAT32 if q.element_size() == 4 else RECEIVED_TILE
        launchable(long_received_kernel)[(ceil_div(tokens, tile.keys) * batch * heads,)](
            q, k, sizes_pointer, lse, received,
            tokens, heads, scale_log2, row_weight, first_row_weight, *strides[:6],
            HAS_SIZES=sizes is not None, ROWS=tile.rows, KEYS=tile.keys, **head, num_warps=4, num_stages=tile.stages,
        )  # fmt: skip
    return out, received, lse


def _allocate_outputs(q: Tensor, with_out: bool, with_received: bool, with_lse: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, channels = q.shape
    out = q.new_empty((batch, tokens, heads * channels) if with_out else (0,))
    received = q.new_empty((batch, heads, tokens) if with_received else (0,), dtype=torch.float32)
    lse = q.new_empty((batch, heads, tokens) if with_lse else (0,), dtype=torch.float32)
    return out, received, lse


def fits(q: Tensor) -> bool:
    """Whether some kernel can hold heads of this width."""
    channels = q.shape[3]
    return channels <= 128 and (channels * q.element_size() <= 256 or _shared_memory(q.device) > _BASE_SHARED_MEMORY)


def _is_short(q: Tensor) -> bool:
    """Whether the short kernel serves: a head's keys and values fit a program, and there are enough heads.

    Not in float32, where compiling one of its many variants takes up to 18 seconds. The interpreter compiles nothing
    and tests it in float32.
    """
    batch, heads, tokens, _ = q.shape
    if is_symbolic(tokens) or (q.element_size() == 4 and not INTERPRETED):
        return False
    if tokens > MAX_SHORT_TOKENS or batch * heads < MIN_SHORT_HEADS:
        return False
    channels, keys, rows = _head_constants(q)["D"], sum(key_tiles(tokens)), _short_rows(tokens)
    elements = keys * (2 * channels + 16) + rows * (keys + channels)
    return elements * q.element_size() <= _shared_memory(q.device)


@torch.compiler.assume_constant_result
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 1 << 20  # the interpreter has no limit
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _head_constants(q: Tensor, precision: str = "ieee") -> dict[str, Any]:
    """Head width, its power of two, and how float32 matrices are multiplied; other dtypes need one product."""
    channels = q.shape[3]
    return {
        "D": max(16, next_power_of_2(channels)),
        "DIM": channels,
        "PRECISION": precision if q.dtype == torch.float32 else "tf32",
    }


def key_tiles(tokens: int) -> tuple[int, int]:
    """Sizes of the short kernel's one or two key tiles, powers of two that cover up to 256 tokens; 0 for no second."""
    if tokens <= 128:
        return max(16, next_power_of_2(tokens)), 0
    return 128, 64 if tokens <= 192 else 128


def _short_rows(tokens: int) -> int:
    """Query rows that the short kernel takes at a time."""
    return 64 if tokens > 32 else 32 if tokens > 16 else 16


def long_tile(q: Tensor) -> Tile:
    """The tile of `long_attention_kernel`: large where large tiles still give every multiprocessor work."""
    batch, heads, tokens, channels = q.shape
    if q.element_size() == 4 or is_symbolic(tokens):
        return ANY_TILE
    if ceil_div(tokens, LARGE_TILE.rows) * batch * heads >= FILL_GPU:
        return LARGE_TILE if channels <= WIDE_HEAD else LARGE_TILE_WIDE_HEADS
    return SMALL_TILE if channels <= WIDE_HEAD else SMALL_TILE_WIDE_HEADS


@torch.library.triton_op("mctf::attention_backward", mutates_args=())
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Tensor | None,
    slots: Tensor | None,
    out: Tensor,
    lse: Tensor,
    out_grad: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each B N (H D), from that of the context, B N (H D).

    lse: B H N, from `mctf::attention`. With `slots`, the gradient of v has one row per key.
    """
    from .triton.attention import key_value_gradient_kernel, query_gradient_kernel

    batch, heads, tokens, _ = q.shape
    q, k, v, out_grad = (contiguous_channels(tensor) for tensor in (q, k, v, out_grad))
    out, lse = out.contiguous(), lse.contiguous()
    sizes_pointer = q if sizes is None else sizes.contiguous()
    slots_pointer = q if slots is None else slots.contiguous()
    q_grad, k_grad, v_grad, deltas = _allocate_gradients(q)
    scalars = (tokens, heads, scale, scale * _LOG2_E)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out_grad.stride()[:2])
    held, looped, stages = _backward_tile(q)
    grid = (batch * heads * ceil_div(tokens, held),)
    options = {"HAS_SIZES": sizes is not None, "UNPOOL": slots is not None, "num_warps": 4, "num_stages": stages}
    options |= _head_constants(q, precision="tf32x3")  # float32 by three products on the tensor cores
    launchable(query_gradient_kernel)[grid](
        q, k, v, sizes_pointer, slots_pointer, out, lse, out_grad, q_grad, deltas,
        *scalars, *strides, ROWS=held, KEYS=looped, **options,
    )  # fmt: skip
    launchable(key_value_gradient_kernel)[grid](
        q, k, v, sizes_pointer, slots_pointer, lse, deltas, out_grad, k_grad, v_grad,
        *scalars, *strides, ROWS=looped, KEYS=held, **options,
    )  # fmt: skip
    return q_grad, k_grad, v_grad


def _allocate_gradients(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, laid out as the parts of a qkv product, and one float32 per row."""
    batch, heads, tokens, channels = q.shape
    q_grad, k_grad, v_grad = (q.new_empty(batch, tokens, heads * channels) for _ in range(3))
    return q_grad, k_grad, v_grad, q.new_empty((batch, heads, tokens), dtype=torch.float32)


def _backward_tile(q: Tensor) -> tuple[int, int, int]:
    if q.element_size() == 4:
        return BACKWARD_TILE_FLOAT32_WIDE_HEADS if q.shape[3] > WIDE_HEAD else BACKWARD_TILE_FLOAT32
    return BACKWARD_TILE


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    q, k, v, sizes, slots, order, start, scale, *_, train = inputs
    if not train:
        raise MctfError("mctf::attention gives gradients only with train=True: pass it, or call under torch.no_grad()")
    out, received, lse = output
    ctx.mark_non_differentiable(received, lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sizes, slots, order, start, out, lse)
    ctx.scale = scale  # type: ignore[attr-defined]


def _backward(
    ctx: torch.autograd.function.FunctionCtx, out_grad: Tensor, *_: Tensor | None
) -> tuple[Tensor | float | None, ...]:
    """Gradients of q, k and v; sizes and attention received have none."""
    q, k, v, sizes, slots, order, start, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
    scale = ctx.scale  # type: ignore[attr-defined]
    q_grad, k_grad, v_grad = attention_backward(q, k, v, sizes, slots, out, lse, out_grad, scale)
    if slots is not None:
        v_grad = pooling.segment_sum(v_grad, order, start)
    heads = q.shape[1]
    return *(grad.unflatten(2, (heads, -1)).transpose(1, 2) for grad in (q_grad, k_grad, v_grad)), *[None] * 9


attention.register_autograd(_backward, setup_context=_setup_context)
