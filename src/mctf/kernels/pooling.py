"""Pooling on the GPU: the operators `mctf::pool` and `mctf::segment_sum`.

Their plain versions are `Assignment.pool` with `Assignment.total`, and `Assignment.sum`.

Axes: B images, N tokens, M slots, C channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.assignment import Assignment, joint_weights
from ..errors import MctfError
from .launch import contiguous_channels, is_symbolic, launchable, next_power_of_2


class Tile(NamedTuple):
    """Channels and members of a slot that a program takes at a time, and its warps."""

    channels: int
    members: int
    warps: int


# With many slots, programs hide each other's latency: one program takes wide rows, one member at a time. With few, the
# slot with most members determines the time: its rows are cut, and several members are read at once. So are those of
# more than 1,024 tokens, whose largest slots have tens of members.
FEW_SLOTS = 2000  # of all images together: ten images of 197 tokens, or three of 577
MANY_SLOTS_TILE = Tile(channels=512, members=1, warps=1)
FEW_SLOTS_TILE = Tile(channels=128, members=4, warps=1)
MANY_TOKENS = 1024
MANY_TOKENS_TILE = Tile(channels=512, members=8, warps=4)
SUM_CHANNELS_PER_WARP = 1024


@torch.library.triton_op("mctf::pool", mutates_args=())
def pool(
    x: Tensor,
    y: Tensor | None,
    weights: Tensor | None,
    sizes: Tensor | None,
    by_size: bool,
    keep_norm: bool,
    slots: Tensor,
    order: Tensor,
    start: Tensor,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weighted means of x and y (B M C; empty without y), by `joint_weights`, and sums of sizes (B M).

    Last the sums of weights (B M), which the gradients need: empty unless `train`. A slot whose weights
    sum to 0, or without members, has the mean 0. keep_norm: means of x have the mean norm of their members; without
    gradient only.

    x, y: B N C; weights, sizes: B N; slots, order: B N and start: B M+1, of an `Assignment`.
    """
    from .triton.pooling import pooling_kernel

    x, order, start = x.contiguous(), order.contiguous(), start.contiguous()
    # a launch needs a pointer for every argument: x stands in for absent tensors, which the kernel does not read
    y_pointer = x if y is None else y.contiguous()
    weights_pointer = x if weights is None else weights.contiguous()
    sizes_pointer = x if sizes is None else sizes.contiguous()
    x_out, y_out, sizes_out, masses_out = _allocate_outputs(x, y, start, train)
    batch, tokens, x_channels = x.shape
    y_channels = y_pointer.shape[2]
    count = start.shape[1] - 1
    few_slots = not (is_symbolic(batch) or is_symbolic(count)) and batch * count <= FEW_SLOTS
    many_tokens = not is_symbolic(tokens) and tokens > MANY_TOKENS
    tile = FEW_SLOTS_TILE if few_slots else MANY_TOKENS_TILE if many_tokens else MANY_SLOTS_TILE
    x_width, y_width = next_power_of_2(x_channels), next_power_of_2(y_channels)
    # programs that share the channels of a slot; a norm is over all of them
    parts = 1 if keep_norm else max(1, max(x_width, y_width) // tile.channels)
    launchable(pooling_kernel)[(count, batch, parts)](
        x, y_pointer, weights_pointer, sizes_pointer, order, start, x_out, y_out, sizes_out, masses_out,
        tokens, count, x_channels, y_channels, *x.stride()[:2], *y_pointer.stride()[:2],
        HAS_Y=y is not None, HAS_WEIGHTS=weights is not None, HAS_SIZES=sizes is not None, BY_SIZE=by_size,
        KEEP_NORM=keep_norm, TRAIN=train, MEMBERS=tile.members,
        X=max(1, x_width // parts), Y=max(1, y_width // parts), num_warps=tile.warps,
    )  # fmt: skip
    return x_out, y_out, sizes_out, masses_out


def _allocate_outputs(x: Tensor, y: Tensor | None, start: Tensor, train: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, count = start.shape[0], start.shape[1] - 1
    x_out = x.new_empty(batch, count, x.shape[2])
    y_out = x.new_empty(0) if y is None else y.new_empty(batch, count, y.shape[2])
    sizes_out = x.new_empty((batch, count), dtype=torch.float32)
    return x_out, y_out, sizes_out, x.new_empty((batch, count) if train else (0,), dtype=torch.float32)


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    _, y, weights, sizes, by_size, keep_norm, slots, _, _, train = inputs
    if not train or keep_norm:
        raise MctfError("mctf::pool gives gradients only with train=True: pass it, or call under torch.no_grad()")
    *_, totals, masses = output
    ctx.mark_non_differentiable(totals, masses)
    ctx.save_for_backward(weights, sizes if by_size else None, slots, masses)  # type: ignore[arg-type]
    ctx.has_y = y is not None  # type: ignore[attr-defined]


def _backward(
    ctx: torch.autograd.function.FunctionCtx, x_grad: Tensor, y_grad: Tensor, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Each token gets its share of its slot's gradient; weights and sizes have none."""
    weights, sizes, slots, masses = ctx.saved_tensors  # type: ignore[attr-defined]
    assignment = Assignment(slots, masses.shape[1])
    counts = torch.ones_like(slots, dtype=torch.float32) if sizes is None else sizes
    share = (joint_weights(weights, counts, True) / assignment.unpool(masses))[..., None]
    to_x = (assignment.unpool(x_grad) * share).to(x_grad.dtype)
    to_y = (assignment.unpool(y_grad) * share).to(y_grad.dtype) if ctx.has_y else None  # type: ignore[attr-defined]
    return to_x, to_y, *[None] * 8


pool.register_autograd(_backward, setup_context=_setup_context)


@torch.library.triton_op("mctf::segment_sum", mutates_args=())
def segment_sum(x: Tensor, order: Tensor, start: Tensor) -> Tensor:
    """Sums of x over the slots: B N C -> B M C. Summed in float32, and in a fixed order."""
    from .triton.pooling import segment_sum_kernel

    x, order, start = contiguous_channels(x), order.contiguous(), start.contiguous()
    batch, tokens, channels = x.shape
    count = start.shape[1] - 1
    out = x.new_empty(batch, count, channels)
    width = next_power_of_2(channels)
    launchable(segment_sum_kernel)[(count, batch)](
        x, order, start, out, tokens, count, channels, *x.stride()[:2],
        X=width, num_warps=max(1, width // SUM_CHANNELS_PER_WARP),
    )  # fmt: skip
    return out
