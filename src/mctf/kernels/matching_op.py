"""Matching on the GPU: the `mctf::match` operator, whose plain meaning is `core.criteria` and `core.matching`."""

import torch
from torch import Tensor

from .launch import launchable

LARGEST_SIDE = 128  # tokens on one side of the split whose scores fit a program's registers
_MOST_PROTECTED = 16


def fits(tokens: int, protected: int) -> bool:
    """Whether one program can match this many tokens."""
    return protected <= _MOST_PROTECTED and 2 <= tokens - protected <= 2 * LARGEST_SIDE


@torch.library.triton_op("mctf::match", mutates_args=())
def match(
    x: Tensor,
    informativeness: Tensor,
    sizes: Tensor | None,
    r: int,
    protected: int,
    tau_sim: float,
    tau_info: float,
    tau_size: float,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Slot of each token (B N, int64), tokens sorted by slot (B N, int32), where each slot begins there (B M+1)."""
    from .matching_triton import matching_kernel

    x, informativeness = x.contiguous(), informativeness.contiguous()
    sizes = None if sizes is None else sizes.contiguous()
    batch, tokens, channels = x.shape
    slots, order, start = _outputs(x, r)
    side = max(16, 1 << ((tokens - protected + 1) // 2 - 1).bit_length())
    launchable(matching_kernel)[(batch,)](
        x, informativeness, x if sizes is None else sizes, slots, order, start,
        tokens, channels, r, r // 2 if bidirectional else r, protected, tau_sim, tau_info, tau_size, *x.stride()[:2],
        HAS_SIZES=sizes is not None, POWER=tau_sim != 1, BIDIRECTIONAL=bidirectional,
        A=side, B=side, CHUNK=32 if x.element_size() == 4 else 64, PROTECTED=_MOST_PROTECTED,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=16 if side == 128 else 4,
    )  # fmt: skip
    return slots, order, start


def _outputs(x: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, _ = x.shape
    slots = x.new_empty((batch, tokens), dtype=torch.int64)
    order = x.new_empty((batch, tokens), dtype=torch.int32)
    start = x.new_empty((batch, tokens - r + 1), dtype=torch.int32)
    return slots, order, start
