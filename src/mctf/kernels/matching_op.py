"""Matching on the GPU: the `mctf::match` operator, whose plain meaning is `core.criteria` and `core.matching`.

Short sequences take one launch, one program an image (`matching_triton`); of a single image the scores come from a
launch of many programs before. Long sequences take five launches of many programs (`matching_large_triton`).

Axes: B images, N tokens, Na and Nb unprotected tokens in even and odd places, M slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .launch import launchable, varies

ONE_PROGRAM = 128  # tokens on one side of the split whose scores fit a program's registers
_ALONE = 64  # of one image only: many programs make the scores of more than these faster than one
MANY_PROGRAMS = 2048  # beyond, ranks by counting cost more than sorting
_MOST_PROTECTED = 16
_ROWS = 64  # fewer would not fill an instruction of a Hopper's tensor cores
_COUNTED, _COUNTED_AGAINST = 16, 512  # tokens whose rank a program counts, and against how many at a time


def fits(tokens: int, protected: int) -> bool:
    """Whether the kernels can match this many tokens."""
    return 2 <= tokens - protected <= 2 * MANY_PROGRAMS and protected <= _MOST_PROTECTED


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
    x, informativeness = x.contiguous(), informativeness.contiguous()
    sizes = None if sizes is None else sizes.contiguous()
    outputs = _outputs(x, r)
    forth = r // 2 if bidirectional else r
    work = _Work(x, informativeness, sizes, *outputs, r, forth, protected, tau_sim, tau_info, tau_size, bidirectional)
    if work.side > ONE_PROGRAM:
        _launch_many(work)
    elif x.shape[0] == 1 and work.side > _ALONE:
        _launch_one(work, _launch_scores(work))
    else:
        _launch_one(work)
    return outputs


def _outputs(x: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, _ = x.shape
    slots = x.new_empty((batch, tokens), dtype=torch.int64)
    order = x.new_empty((batch, tokens), dtype=torch.int32)
    start = x.new_empty((batch, tokens - r + 1), dtype=torch.int32)
    return slots, order, start


class _Work(NamedTuple):
    """The operator's arguments and outputs, on their way to the kernels; forth: alpha tokens that leave."""

    x: Tensor
    informativeness: Tensor
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

    def sides(self) -> tuple[int, int]:
        """Unprotected tokens in even and in odd places."""
        alphas = (self.x.shape[1] - self.protected + (self.protected + 1) % 2) // 2
        return alphas, self.x.shape[1] - self.protected - alphas

    def criteria(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the scores are made of; a kernel wants a pointer even where it will not read."""
        return self.x, self.informativeness, self.x if self.sizes is None else self.sizes

    def taus(self) -> tuple[float, float, float]:
        return self.tau_sim, self.tau_info, self.tau_size

    def flags(self) -> dict[str, bool | int | str]:
        """What the kernels are compiled for."""
        exact = self.x.dtype == torch.float32
        return {
            "HAS_SIZES": self.sizes is not None,
            "POWER": self.tau_sim != 1,
            "CHUNK": 32 if exact else 64,
            "PRECISION": "ieee" if exact else "tf32",
        }


def _launch_one(work: _Work, scores: Tensor | None = None) -> None:
    from .matching_triton import matching_kernel

    batch, tokens, channels = work.x.shape
    side = ONE_PROGRAM if varies(work.side) else max(16, 1 << (work.side - 1).bit_length())
    launchable(matching_kernel)[(batch,)](
        *work.criteria(), work.x if scores is None else scores, work.slots, work.order, work.start,
        tokens, channels, work.r, work.forth, work.protected, *work.taus(), *work.x.stride()[:2],
        SCORED=scores is not None, BIDIRECTIONAL=work.bidirectional,
        A=side, B=side, PROTECTED=_MOST_PROTECTED, **work.flags(),
        num_warps=16 if side == ONE_PROGRAM else 4,
    )  # fmt: skip


def _launch_scores(work: _Work, best: Tensor | None = None) -> Tensor:
    """Attraction of all pairs, B Na Nb; best: takes that of each alpha token, see the kernel."""
    from .matching_large_triton import scores_kernel

    x, batch, (tokens, channels) = work.x, work.x.shape[0], work.x.shape[1:]
    alphas, betas = work.sides()
    scores = x.new_empty((batch, alphas, betas), dtype=torch.float32)
    flags = work.flags()
    columns = 64
    if batch == 1:  # a single image must be cut small, and read in large pieces, to keep a GPU busy
        columns = 32
        flags["CHUNK"] = 64 if x.dtype == torch.float32 else 128
    launchable(scores_kernel)[(-(-alphas // _ROWS), -(-betas // columns), batch)](
        *work.criteria(), scores, scores if best is None else best,
        tokens, channels, alphas, betas, work.protected, *work.taus(), *x.stride()[:2],
        BEST=best is not None, A=_ROWS, B=columns, **flags, num_warps=4, num_stages=3,
    )  # fmt: skip
    return scores


def _launch_many(work: _Work) -> None:
    from .matching_large_triton import back_kernel, leaving_kernel, members_kernel, slots_kernel

    x, batch, tokens = work.x, *work.x.shape[:2]
    protected, forth = work.protected, work.forth
    alphas, betas = work.sides()
    best = x.new_zeros((batch, alphas), dtype=torch.int64)
    scores = _launch_scores(work, best)
    count = {"MINE": _COUNTED, "OTHERS": _COUNTED_AGAINST}
    gone, alpha_partner = (x.new_empty((batch, alphas), dtype=torch.int32) for _ in range(2))
    launchable(leaving_kernel)[(-(-alphas // _COUNTED), batch)](
        best, gone, alpha_partner, alphas, betas, forth, **count
    )
    strength = x.new_empty((batch, betas), dtype=torch.float32)
    beta_partner = x.new_empty((batch, betas), dtype=torch.int32)
    if work.bidirectional:
        launchable(back_kernel)[(-(-betas // 32), batch)](
            scores, gone, strength, beta_partner, alphas, betas, A=128, B=32
        )
    launchable(slots_kernel)[(-(-tokens // _COUNTED), batch)](
        gone, alpha_partner, strength, beta_partner, work.slots, tokens, alphas, betas, work.r, forth, protected,
        BIDIRECTIONAL=work.bidirectional, **count,
    )  # fmt: skip
    launchable(members_kernel)[(-(-(tokens + 1) // _COUNTED), batch)](
        work.slots, work.order, work.start, tokens, tokens - work.r, **count
    )
