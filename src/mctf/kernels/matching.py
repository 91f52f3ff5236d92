"""Matching on the GPU: the `mctf::match` operator, whose plain meaning is `core.criteria` and `core.matching`.

Short sequences take one launch, one program an image (`matching_triton`). Long sequences, and single images but the
smallest, take four or five launches of many programs (`matching_large_triton`).

Axes: B images, N tokens, Na and Nb unprotected tokens in even and odd places, M slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.matching import total_received
from .launch import launchable, varies

ONE_PROGRAM = 128  # tokens on one side of the split whose scores fit a program's registers
_ALONE = 64  # a single image with more tokens on a side than this is faster by many programs
MANY_PROGRAMS = 2048  # beyond, ranks by counting cost more than sorting
_MOST_PROTECTED = 16
_KEEPS_BUSY = 512  # tokens on a side whose pairs, in large tiles, are enough for a GPU
_COUNTED, _COUNTED_AGAINST = 8, 512  # tokens whose rank a program counts, and against how many at a time


def fits(tokens: int, protected: int) -> bool:
    """Whether the kernels can match this many tokens."""
    return 2 <= tokens - protected <= 2 * MANY_PROGRAMS and protected <= _MOST_PROTECTED


@torch.library.triton_op("mctf::match", mutates_args=())
def match(
    x: Tensor,
    received: Tensor,
    sizes: Tensor | None,
    r: int,
    protected: int,
    tau_sim: float,
    tau_info: float,
    tau_size: float,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slot of each token (B N, int64), tokens sorted by slot (B N, int32), where each slot begins there (B M+1).

    And the informativeness of each token (B N), the sum of `received` (B G N).
    """
    x, received = x.contiguous(), received.contiguous()
    sizes = None if sizes is None else sizes.contiguous()
    outputs = _outputs(x, r)
    forth = r // 2 if bidirectional else r
    work = _Work(x, received, sizes, *outputs, r, forth, protected, tau_sim, tau_info, tau_size, bidirectional)
    informativeness = (_launch_many if work.wants_many_programs() else _launch_one)(work)
    return *outputs, informativeness


def _outputs(x: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, _ = x.shape
    slots = x.new_empty((batch, tokens), dtype=torch.int64)
    order = x.new_empty((batch, tokens), dtype=torch.int32)
    start = x.new_empty((batch, tokens - r + 1), dtype=torch.int32)
    return slots, order, start


class _Work(NamedTuple):
    """The operator's arguments and outputs, on their way to the kernels; forth: alpha tokens that leave."""

    x: Tensor
    received: Tensor
    sizes: Tensor | None
    slots: Tensor
    order: Tensor
    start: Tensor
    r: int
    forth: int
    protected: int
    tau_sim: float
    tau_info: float
    tau_size: float
    bidirectional: bool

    @property
    def side(self) -> int:
        """Unprotected tokens of the larger side."""
        return (self.x.shape[1] - self.protected + 1) // 2

    def wants_many_programs(self) -> bool:
        """Whether an image is too large for one program, or the only one and large enough."""
        return self.side > (_ALONE if self.x.shape[0] == 1 else ONE_PROGRAM)

    def sides(self) -> tuple[int, int]:
        """Unprotected tokens in even and in odd places."""
        alphas = (self.x.shape[1] - self.protected + (self.protected + 1) % 2) // 2
        return alphas, self.x.shape[1] - self.protected - alphas

    def criteria(self, received: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the scores are made of: tokens, their lengths, the attention they receive, sizes.

        Lengths are taken outside: torch.compile makes them where it reads x for a norm anyway, and the kernels, with
        nothing else to do with x than to multiply it, fetch it ahead. They want a pointer even where they do not read.
        """
        lengths = torch.linalg.vector_norm(self.x, dim=2, dtype=torch.float32)
        return self.x, lengths, received, self.x if self.sizes is None else self.sizes

    def taus(self) -> tuple[float, float, float]:
        return self.tau_sim, self.tau_info, self.tau_size

    def tile(self) -> tuple[int, int, int]:
        """Alpha tokens, beta tokens and channels at a time of a program that makes scores."""
        exact = self.x.element_size() == 4
        large = not varies(self.side) and self.side > _KEEPS_BUSY
        if self.x.shape[0] == 1 and not large:  # cut small, and read in large pieces
            return 64, 16, 64 if exact else 128
        return (128, 128, 64) if large and not exact else (64, 64, 32 if exact else 64)

    def flags(self) -> dict[str, bool | str]:
        """What the kernels are compiled for."""
        exact = self.x.dtype == torch.float32
        return {
            "HAS_SIZES": self.sizes is not None,
            "POWER": self.tau_sim != 1,
            "PRECISION": "tf32x3" if exact else "tf32",  # float32 by three products on the tensor cores
        }


def _launch_one(work: _Work) -> Tensor:
    """All in one program an image, the informativeness, which is returned, too."""
    from .triton.matching import matching_kernel

    batch, tokens, channels = work.x.shape
    side = ONE_PROGRAM if varies(work.side) else max(16, 1 << (work.side - 1).bit_length())
    informativeness = work.x.new_empty((batch, tokens), dtype=torch.float32)
    launchable(matching_kernel)[(batch,)](
        *work.criteria(work.received), work.slots, work.order, work.start, informativeness,
        tokens, channels, work.sides()[0], work.r, work.forth, work.protected, *work.taus(), *work.x.stride()[:2],
        BIDIRECTIONAL=work.bidirectional, PARTS=work.received.shape[1], SIDE=side, PROTECTED=_MOST_PROTECTED,
        CHUNK=32 if work.x.element_size() == 4 else 64, **work.flags(),
        # of 2 to 16; of 128 tokens, more have more to exchange than to count, but float32 needs their registers
        num_warps=8 if side == 64 or work.x.element_size() == 4 else 4,
    )  # fmt: skip
    return informativeness


def _launch_scores(work: _Work, informativeness: Tensor) -> tuple[Tensor, Tensor]:
    """Attraction of all pairs, B Na Nb or wider, and the best of each alpha token with its partner, B Na."""
    from .triton.matching_large import scores_kernel

    x, batch, (tokens, channels) = work.x, work.x.shape[0], work.x.shape[1:]
    alphas, betas = work.sides()
    scores = x.new_empty((batch, alphas, -(-betas // 16) * 16), dtype=torch.float32)
    pairs = x.new_zeros((batch, alphas), dtype=torch.int64)
    rows, columns, chunk = work.tile()
    launchable(scores_kernel)[(-(-alphas // rows), -(-betas // columns), batch)](
        *work.criteria(informativeness), scores, pairs,
        tokens, channels, alphas, betas, scores.shape[2], work.protected, *work.taus(), *x.stride()[:2],
        A=rows, B=columns, CHUNK=chunk, **work.flags(), num_warps=4, num_stages=3,
    )  # fmt: skip
    return scores, pairs


def _launch_many(work: _Work) -> Tensor:
    """Piece by piece; the informativeness."""
    from .triton.matching_large import back_kernel, leaving_kernel, members_kernel, slots_kernel

    x, batch, tokens = work.x, *work.x.shape[:2]
    protected, forth = work.protected, work.forth
    alphas, betas = work.sides()
    informativeness = total_received(work.received)
    scores, pairs = _launch_scores(work, informativeness)
    count = {"MINE": _COUNTED, "OTHERS": _COUNTED_AGAINST}
    gone, alpha_partner = (x.new_empty((batch, alphas), dtype=torch.int32) for _ in range(2))
    leavers = x.new_empty((batch, work.r), dtype=torch.int32)
    launchable(leaving_kernel)[(-(-alphas // _COUNTED), batch)](
        pairs, gone, alpha_partner, leavers, alphas, betas, work.r, forth, protected, **count
    )
    strength = x.new_empty((batch, betas), dtype=torch.float32)
    beta_partner = x.new_empty((batch, betas), dtype=torch.int32)
    if work.bidirectional:
        launchable(back_kernel)[(-(-betas // 16), batch)](
            scores, gone, strength, beta_partner, alphas, betas, scores.shape[2], A=256, B=16
        )
    launchable(slots_kernel)[(-(-tokens // _COUNTED), batch)](
        gone, alpha_partner, strength, beta_partner, leavers, work.slots,
        tokens, alphas, betas, work.r, forth, protected,
        BIDIRECTIONAL=work.bidirectional, **count,
    )  # fmt: skip
    launchable(members_kernel)[(-(-tokens // _COUNTED), batch)](
        work.slots, leavers, work.order, work.start, tokens, tokens - work.r, **count
    )
    return informativeness
