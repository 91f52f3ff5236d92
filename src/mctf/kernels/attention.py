"""Attention and informativeness on the GPU: the `mctf::attention` operator and when it is used.

Its plain meaning is `core.attention.attend` and `core.attention.informativeness`; the kernels are in
`attention_triton`. Short sequences take one launch for both results, long ones two.

Axes: B images, H heads, N tokens, M slots, D channels a head.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MctfError
from . import pooling
from .launch import INTERPRETED, channels_last, launchable, varies, widths

_LONGEST_IN_ONE_PASS = 256  # tokens whose logits fit a program's registers
_FEW_HEADS = 64  # over a batch: fewer would leave most of a GPU idle with one program each
_BUSY = 264  # programs that keep a large GPU busy: two for each of 132 multiprocessors
_SMALL_SHARED = 99 << 10  # bytes of shared memory every supported GPU gives a program
_LOG2_E = math.log2(math.e)


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
    look: bool,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Context (B N H*D; empty without v), received attention and normaliser (B H N, float32).

    Received attention is empty without `look`. The normaliser, log2 of each row's sum of exp(logit) * size, is what
    gradients need besides; `train` announces that they will be asked for.

    scale is positive; a key of size 0 is as if it were not there.

    received[b, h, j] = sum over rows i of A[b, h, i, j] * (row_weight / N + first_row_weight * [i == 0]) / H.
    With `slots` (B N), v has one row a slot and each key takes the value of its slot; to train, `order` and `start`
    (`Assignment.members`) name the keys of each slot.
    """
    q, k = channels_last(q), channels_last(k)
    v = None if v is None else channels_last(v)
    sizes = None if sizes is None else sizes.contiguous()
    slots = None if slots is None else slots.contiguous()
    one_pass = _fits_one_pass(q)
    out, received, normaliser = _outputs(q, v is not None, look, train or not one_pass)
    scalars = (scale * _LOG2_E, row_weight, first_row_weight)
    work = _Work(q, k, v, sizes, slots, out, received, normaliser, *scalars, look, train)
    (_launch_short if one_pass else _launch_long)(work)
    return out, received, normaliser


def _outputs(q: Tensor, output: bool, look: bool, level: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, channels = q.shape
    out = q.new_empty((batch, tokens, heads * channels) if output else (0,))
    received = q.new_empty((batch, heads, tokens) if look else (0,), dtype=torch.float32)
    normaliser = q.new_empty((batch, heads, tokens) if level else (0,), dtype=torch.float32)
    return out, received, normaliser


def fits(q: Tensor) -> bool:
    """Whether some kernel can hold heads of this width."""
    channels = q.shape[3]
    return channels <= 128 and (channels * q.element_size() <= 256 or _shared_memory(q.device) > _SMALL_SHARED)


def _fits_one_pass(q: Tensor) -> bool:
    """Whether the keys and values of a head, and the logits of some rows, fit a program, and there are enough heads.

    In float32 the compiler would take up to 18 seconds for each of many variants, so it goes the long way; not so under
    the interpreter, which compiles nothing and has float32 to test this way with.
    """
    batch, heads, tokens, _ = q.shape
    if varies(tokens) or (q.element_size() == 4 and not INTERPRETED):
        return False
    if tokens > _LONGEST_IN_ONE_PASS or batch * heads < _FEW_HEADS:
        return False
    channels, keys, rows = widths(q)["D"], sum(key_tiles(tokens)), _rows_at_once(tokens)
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
    normaliser: Tensor
    scale_log2: float
    row_weight: float
    first_row_weight: float
    look: bool
    train: bool

    def or_query(self, tensor: Tensor | None) -> Tensor:
        """A kernel wants a pointer even where it will not read: the queries' will do."""
        return self.q if tensor is None else tensor

    def flags(self) -> dict[str, bool]:
        return {"HAS_SIZES": self.sizes is not None, "SPREAD": self.slots is not None, "OUTPUT": self.v is not None}


def _launch_short(work: _Work) -> None:
    from .triton.attention import attention_kernel

    q, k, values = work.q, work.k, work.or_query(work.v)
    batch, heads, tokens, _ = q.shape
    tiles = key_tiles(tokens)
    launchable(attention_kernel)[(batch * heads,)](
        q, k, values, work.or_query(work.sizes), work.or_query(work.slots), work.out, work.received,
        work.normaliser, tokens, heads, work.scale_log2, work.row_weight, work.first_row_weight,
        *q.stride()[:3], *k.stride()[:3], *values.stride()[:3],
        LOOK=work.look, TRAIN=work.train, ROWS=_rows_at_once(tokens), T1=tiles[0], T2=tiles[1],
        **work.flags(), **widths(q), num_warps=4, num_stages=1,
    )  # fmt: skip


def _launch_long(work: _Work) -> None:
    from .triton.attention import long_attention_kernel, long_received_kernel

    q, k, values = work.q, work.k, work.or_query(work.v)
    batch, heads, tokens, _ = q.shape
    rows, keys, stages = _long_tiles(q)
    launchable(long_attention_kernel)[(-(-tokens // rows) * batch * heads,)](
        q, k, values, work.or_query(work.sizes), work.or_query(work.slots), work.out, work.normaliser,
        tokens, heads, work.scale_log2, *q.stride()[:3], *k.stride()[:3], *values.stride()[:3],
        ROWS=rows, KEYS=keys, **work.flags(), **widths(q), num_warps=4, num_stages=stages,
    )  # fmt: skip
    if work.look:
        launchable(long_received_kernel)[(-(-tokens // 64) * batch * heads,)](
            q, k, work.or_query(work.sizes), work.normaliser, work.received,
            tokens, heads, work.scale_log2, work.row_weight, work.first_row_weight, *q.stride()[:3], *k.stride()[:3],
            HAS_SIZES=work.sizes is not None, ROWS=64 if q.element_size() == 4 else 128, KEYS=64, **widths(q),
            num_warps=4, num_stages=2 if q.element_size() == 4 else 3,
        )  # fmt: skip


def _long_tiles(q: Tensor) -> tuple[int, int, int]:
    """Rows a program holds, keys it walks over at a time, and how many of these loads are under way at once.

    On an H200, 64 images of 577 tokens and 12 heads took 270 us by the first choice and 326 by the second; one image
    9.6 us by the second.
    """
    batch, heads, tokens, channels = q.shape
    if q.element_size() == 4 or varies(tokens):
        return 64, 64, 2
    if -(-tokens // 128) * batch * heads >= _BUSY:
        return 128, 64, 3 if channels <= 64 else 2
    return 64, 128 if channels <= 64 else 64, 2


def _rows_at_once(tokens: int) -> int:
    return 64 if tokens > 32 else 32 if tokens > 16 else 16


def key_tiles(tokens: int) -> tuple[int, int]:
    """One or two tile sizes, powers of two, that cover up to 256 tokens with little to spare; 0 for none."""
    if tokens <= 128:
        return max(16, 1 << (tokens - 1).bit_length()), 0
    return 128, 64 if tokens <= 192 else 128


def _keep_for_backward(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    q, k, v, sizes, slots, order, start, scale, *_, train = inputs
    if not train:
        raise MctfError(
            "mctf::attention keeps what its gradients need only with train=True: ask for it, or for no_grad"
        )
    out, received, normaliser = output
    ctx.mark_non_differentiable(received, normaliser)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sizes, slots, order, start, out, normaliser)
    ctx.scale = scale  # type: ignore[attr-defined]


def _backward(
    ctx: torch.autograd.function.FunctionCtx, out_grad: Tensor, *_: Tensor | None
) -> tuple[Tensor | float | None, ...]:
    """Gradients of q, k and v; sizes and received attention carry none."""
    q, k, v, sizes, slots, order, start, out, normaliser = ctx.saved_tensors  # type: ignore[attr-defined]
    scale = ctx.scale  # type: ignore[attr-defined]
    *to_both, to_v = attention_backward(q, k, v, sizes, slots, out, normaliser, out_grad, scale)
    if slots is not None:
        to_v = pooling.add_up(to_v, order, start)
    heads = q.shape[1]
    return *(grad.unflatten(2, (heads, -1)).transpose(1, 2) for grad in (*to_both, to_v)), *[None] * 9


attention.register_autograd(_backward, setup_context=_keep_for_backward)


# MERGED from mctf.kernels.attention:
# Gradients of attention on the GPU: the `mctf::attention_backward` operator.
#
# Its plain meaning is what autograd makes of `core.attention.attend`; the kernels are in `attention_backward_triton`.
#
# Axes: B images, H heads, N tokens, M slots, D channels a head.

_LOG2_E = math.log2(math.e)


@torch.library.triton_op("mctf::attention_backward", mutates_args=())
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Tensor | None,
    slots: Tensor | None,
    out: Tensor,
    normaliser: Tensor,
    out_grad: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each B N (H D), from that of the context, B N (H D).

    normaliser: B H N, log2 of each row's sum of exp(logit) * size. With `slots`, the gradient of v has one row a key.
    """
    from .triton.attention import key_value_gradient_kernel, query_gradient_kernel

    q, k, v, out_grad = (channels_last(tensor) for tensor in (q, k, v, out_grad))
    out, normaliser = out.contiguous(), normaliser.contiguous()
    some_sizes = q if sizes is None else sizes.contiguous()  # a kernel wants a pointer even where it will not read
    some_slots = q if slots is None else slots.contiguous()
    inputs = (q, k, v, some_sizes, some_slots)
    q_grad, k_grad, v_grad, deltas = _gradient_outputs(q)
    batch, heads, tokens, _ = q.shape
    numbers = (
        *(tokens, heads, scale, scale * _LOG2_E),
        *(stride for tensor in (q, k, v) for stride in tensor.stride()[:3]),
        *out_grad.stride()[:2],
    )
    held, walked, stages = _tiles(q)
    grid = (batch * heads * -(-tokens // held),)
    options = {"HAS_SIZES": sizes is not None, "SPREAD": slots is not None, "num_warps": 4, "num_stages": stages}
    options |= widths(q, precise="tf32x3")  # float32 by three products on the tensor cores
    launchable(query_gradient_kernel)[grid](
        *inputs, out, normaliser, out_grad, q_grad, deltas, *numbers, ROWS=held, KEYS=walked, **options
    )
    launchable(key_value_gradient_kernel)[grid](
        *inputs, normaliser, deltas, out_grad, k_grad, v_grad, *numbers, ROWS=walked, KEYS=held, **options
    )
    return q_grad, k_grad, v_grad


def _gradient_outputs(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three gradients, laid out as a qkv product leaves its parts, and a number a row for the second kernel."""
    batch, heads, tokens, channels = q.shape
    q_grad, k_grad, v_grad = (q.new_empty(batch, tokens, heads * channels) for _ in range(3))
    return q_grad, k_grad, v_grad, q.new_empty((batch, heads, tokens), dtype=torch.float32)


def _tiles(q: Tensor) -> tuple[int, int, int]:
    """Tokens a program holds, tokens it walks over at a time, and how many of these loads are under way at once.

    The fastest of 21 shapes on an H200 in bfloat16, 197 and 101 tokens; up to 64 channels a head hardly a register is
    spilled, and 99 KiB of shared memory, which every supported GPU has, suffice.
    """
    if q.element_size() == 4:
        return (32 if q.shape[3] > 64 else 64), 32, 1
    return 64, 32, 2
