"""Gradients of attention on the GPU: the `mctf::attention_backward` operator.

Its plain meaning is what autograd makes of `core.attention.attend`; the kernels are in `attention_backward_triton`.

Axes: B images, H heads, N tokens, M slots, D channels a head.
"""

import math

import torch
from torch import Tensor

from .launch import channels_last, launchable, widths

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
    from .attention_backward_triton import key_value_gradient_kernel, query_gradient_kernel

    q, k, v, out_grad = (channels_last(tensor) for tensor in (q, k, v, out_grad))
    out, normaliser = out.contiguous(), normaliser.contiguous()
    some_sizes = q if sizes is None else sizes.contiguous()  # a kernel wants a pointer even where it will not read
    some_slots = q if slots is None else slots.contiguous()
    inputs = (q, k, v, some_sizes, some_slots)
    q_grad, k_grad, v_grad, deltas = _outputs(q)
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


def _outputs(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
