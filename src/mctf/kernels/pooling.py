"""Pooling on the GPU: the operators `mctf::pool` and `mctf::add_up`.

Their plain meanings are `Assignment.pool` with `Assignment.total`, and `Assignment.sum`.

Axes: B images, N tokens, M slots, C channels.
"""

import torch
from torch import Tensor

from ..core.assignment import Assignment, joint_weights
from ..errors import MctfError
from .launch import channels_last, launchable, varies

_FEW_SLOTS = 2000  # of all images together: ten images of 197 tokens, or three of 577


@torch.library.triton_op("mctf::pool", mutates_args=())
def pool(
    x: Tensor,
    y: Tensor | None,
    weights: Tensor | None,
    sizes: Tensor | None,
    by_size: bool,
    slots: Tensor,
    order: Tensor,
    start: Tensor,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weighted means of x and y (B M C; empty without y), by `joint_weights`, and sums of sizes (B M).

    Last the sums of weights (B M), which gradients need: empty unless `train` announces that they will be asked for.
    """
    from .triton.pooling import pooling_kernel

    x, order, start = x.contiguous(), order.contiguous(), start.contiguous()
    y, weights, sizes = (None if tensor is None else tensor.contiguous() for tensor in (y, weights, sizes))
    outputs = _outputs(x, y, start, train)
    other = x if y is None else y
    batch, tokens, channels = x.shape
    count = start.shape[1] - 1
    x_width, y_width = (1 << (tensor.shape[2] - 1).bit_length() for tensor in (x, other))
    parts, manner = _manner(batch, count, max(x_width, y_width))
    launchable(pooling_kernel)[(count, batch, parts)](
        x, other, x if weights is None else weights, x if sizes is None else sizes, order, start, *outputs,
        tokens, count, channels, other.shape[2], *x.stride()[:2], *other.stride()[:2],
        HAS_Y=y is not None, HAS_WEIGHTS=weights is not None, HAS_SIZES=sizes is not None, BY_SIZE=by_size,
        TRAIN=train, X=max(1, x_width // parts), Y=max(1, y_width // parts), **manner,
    )  # fmt: skip
    return outputs


def _manner(batch: int, count: int, width: int) -> tuple[int, dict[str, int]]:
    """Into how many parts the channels are cut; how many members a program adds up at a time, and its warps.

    Where there are many slots, the programs hide each other's waiting. Of few, the one with most members is waited for.
    """
    if not (varies(batch) or varies(count)) and batch * count <= _FEW_SLOTS:
        return max(1, width // 128), {"MEMBERS": 4, "num_warps": 1}
    return max(1, width // 512), {"MEMBERS": 1, "num_warps": 1}


def _outputs(x: Tensor, y: Tensor | None, start: Tensor, train: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, count = start.shape[0], start.shape[1] - 1
    x_out = x.new_empty(batch, count, x.shape[2])
    y_out = x.new_empty(0) if y is None else y.new_empty(batch, count, y.shape[2])
    sizes_out = x.new_empty((batch, count), dtype=torch.float32)
    return x_out, y_out, sizes_out, x.new_empty((batch, count) if train else (0,), dtype=torch.float32)


def _keep_for_backward(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    _, y, weights, sizes, by_size, slots, _, _, train = inputs
    if not train:
        raise MctfError("mctf::pool keeps what its gradients need only with train=True: ask for it, or for no_grad")
    *_, totals, masses = output
    ctx.mark_non_differentiable(totals, masses)
    ctx.save_for_backward(weights, sizes if by_size else None, slots, masses)  # type: ignore[arg-type]
    ctx.has_y = y is not None  # type: ignore[attr-defined]


def _backward(
    ctx: torch.autograd.function.FunctionCtx, x_grad: Tensor, y_grad: Tensor, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Each token gets its share of its slot's gradient; weights and sizes carry none."""
    weights, sizes, slots, masses = ctx.saved_tensors  # type: ignore[attr-defined]
    assignment = Assignment(slots, masses.shape[1])
    counts = torch.ones_like(slots, dtype=torch.float32) if sizes is None else sizes
    share = (joint_weights(weights, counts, True) / assignment.unpool(masses))[..., None]
    to_x = (assignment.unpool(x_grad) * share).to(x_grad.dtype)
    to_y = (assignment.unpool(y_grad) * share).to(y_grad.dtype) if ctx.has_y else None  # type: ignore[attr-defined]
    return to_x, to_y, *[None] * 7


pool.register_autograd(_backward, setup_context=_keep_for_backward)


@torch.library.triton_op("mctf::add_up", mutates_args=())
def add_up(x: Tensor, order: Tensor, start: Tensor) -> Tensor:
    """Sums of x over the slots: B N C -> B M C. Added in float32, and in a fixed order."""
    from .triton.pooling import sum_kernel

    x, order, start = channels_last(x), order.contiguous(), start.contiguous()
    batch, tokens, channels = x.shape
    count = start.shape[1] - 1
    out = x.new_empty(batch, count, channels)
    width = 1 << (channels - 1).bit_length()
    launchable(sum_kernel)[(count, batch)](
        x, order, start, out, tokens, count, channels, *x.stride()[:2], X=width, num_warps=max(1, width // 1024)
    )
    return out
