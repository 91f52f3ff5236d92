"""Matching on the GPU: the operator `mctf::match`, whose plain version is `core.matching`.

Short sequences take one launch with one program per image (`triton/matching.py`). Long sequences, and single images
except the smallest, take four or five launches of many programs (`triton/matching_large.py`).

Axes: B images, N tokens, Na and Nb unprotected tokens in even and odd positions (alpha and beta), M slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.attention import total_received
from .launch import ceil_div, is_symbolic, launchable, next_power_of_2

# Which kernels, by the number of tokens on the larger side.
MAX_ONE_PROGRAM = 128  # pairs of more tokens do not fit a program's registers
MAX_ONE_PROGRAM_SINGLE_IMAGE = 64  # a single image with more is faster with many programs
MAX_MANY_PROGRAMS = 2048  # beyond, ranking by counting costs more than sorting
MAX_PROTECTED = 16


class ScoresTile(NamedTuple):
    """Alpha tokens, beta tokens and channels that a program of `scores_kernel` takes at a time."""

    alphas: int
    betas: int
    channels: int


# Large tiles where their programs are enough for a GPU; a single image is cut small, and read in wide pieces.
FILL_GPU = 512  # tokens on a side whose pairs, in large tiles, keep a GPU busy
LARGE_TILE = ScoresTile(128, 128, 64)
TILE, TILE_FLOAT32 = ScoresTile(64, 64, 64), ScoresTile(64, 64, 32)
SINGLE_IMAGE_TILE, SINGLE_IMAGE_TILE_FLOAT32 = ScoresTile(64, 16, 128), ScoresTile(64, 16, 64)
SCORES_PITCH = 16  # rows of scores begin at multiples of it: several numbers per load and store
RANK_TILE = {"BLOCK": 8, "OTHERS": 512}  # tokens that a program ranks, and against how many at a time
BETA_TILE = {"A": 256, "B": 16}  # alpha tokens at a time, and beta tokens per program, of `beta_partners_kernel`


def fits(tokens: int, protected: int) -> bool:
    """Whether the kernels can match this many tokens."""
    return 2 <= tokens - protected <= 2 * MAX_MANY_PROGRAMS and protected <= MAX_PROTECTED


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

    Last the informativeness of each token (B N), the sum of `received` (B G N).
    x: B N C; sizes: B N. `bidirectional`: r // 2 alpha tokens are merged into beta, then the rest of r beta tokens into
    alpha; otherwise r alpha tokens into beta.
    """
    x, received = x.contiguous(), received.contiguous()
    sizes_pointer = x if sizes is None else sizes.contiguous()  # x stands in where the kernels do not read
    slots, order, start = _allocate_outputs(x, r)
    batch, tokens, channels = x.shape
    alphas = (tokens - protected + (protected + 1) % 2) // 2
    betas = tokens - protected - alphas
    larger_side = (tokens - protected + 1) // 2
    r_alpha = r // 2 if bidirectional else r
    is_float32 = x.element_size() == 4
    taus = (tau_sim, tau_info, tau_size)
    flags = {
        "HAS_SIZES": sizes is not None,
        "POWER": tau_sim != 1,
        "PRECISION": "tf32x3" if is_float32 else "tf32",  # float32 by three products on the tensor cores
    }

    if larger_side <= (MAX_ONE_PROGRAM_SINGLE_IMAGE if batch == 1 else MAX_ONE_PROGRAM):
        from .triton.matching import matching_kernel

        side = MAX_ONE_PROGRAM if is_symbolic(larger_side) else max(16, next_power_of_2(larger_side))
        informativeness = x.new_empty((batch, tokens), dtype=torch.float32)
        launchable(matching_kernel)[(batch,)](
            x, _row_norms(x), received, sizes_pointer, slots, order, start, informativeness,
            tokens, channels, alphas, r, r_alpha, protected, *taus, *x.stride()[:2],
            BIDIRECTIONAL=bidirectional, PARTS=received.shape[1], SIDE=side, PROTECTED=MAX_PROTECTED,
            CHUNK=32 if is_float32 else 64, **flags,
            # fastest of 2 to 16; with 128 tokens more warps exchange more than they count, but float32 needs registers
            num_warps=8 if side == 64 or is_float32 else 4,
        )  # fmt: skip
        return slots, order, start, informativeness

    from .triton.matching_large import (
        alpha_merges_kernel,
        beta_partners_kernel,
        members_kernel,
        scores_kernel,
        slots_kernel,
    )

    informativeness = total_received(received)
    # scores of all pairs, and the best of each alpha token with its partner, packed in one number
    tile = _scores_tile(x, larger_side)
    pitch = ceil_div(betas, SCORES_PITCH) * SCORES_PITCH
    scores = x.new_empty((batch, alphas, pitch), dtype=torch.float32)
    best_pairs = x.new_zeros((batch, alphas), dtype=torch.int64)
    launchable(scores_kernel)[(ceil_div(alphas, tile.alphas), ceil_div(betas, tile.betas), batch)](
        x, _row_norms(x), informativeness, sizes_pointer, scores, best_pairs,
        tokens, channels, alphas, betas, pitch, protected, *taus, *x.stride()[:2],
        A=tile.alphas, B=tile.betas, CHUNK=tile.channels, **flags, num_warps=4, num_stages=3,
    )  # fmt: skip
    # alpha tokens that are merged into beta
    alpha_merged, alpha_partner = (x.new_empty((batch, alphas), dtype=torch.int32) for _ in range(2))
    merged_tokens = x.new_empty((batch, r), dtype=torch.int32)
    launchable(alpha_merges_kernel)[(ceil_div(alphas, RANK_TILE["BLOCK"]), batch)](
        best_pairs, alpha_merged, alpha_partner, merged_tokens, alphas, betas, r, r_alpha, protected, **RANK_TILE
    )
    # the best pair of each beta token with an alpha token that is kept
    beta_strength = x.new_empty((batch, betas), dtype=torch.float32)
    beta_partner = x.new_empty((batch, betas), dtype=torch.int32)
    if bidirectional:
        launchable(beta_partners_kernel)[(ceil_div(betas, BETA_TILE["B"]), batch)](
            scores, alpha_merged, beta_strength, beta_partner, alphas, betas, pitch, **BETA_TILE
        )
    token_grid = (ceil_div(tokens, RANK_TILE["BLOCK"]), batch)
    launchable(slots_kernel)[token_grid](
        alpha_merged, alpha_partner, beta_strength, beta_partner, merged_tokens, slots,
        tokens, alphas, betas, r, r_alpha, protected, BIDIRECTIONAL=bidirectional, **RANK_TILE,
    )  # fmt: skip
    launchable(members_kernel)[token_grid](slots, merged_tokens, order, start, tokens, tokens - r, **RANK_TILE)
    return slots, order, start, informativeness


def _allocate_outputs(x: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, _ = x.shape
    slots = x.new_empty((batch, tokens), dtype=torch.int64)
    order = x.new_empty((batch, tokens), dtype=torch.int32)
    start = x.new_empty((batch, tokens - r + 1), dtype=torch.int32)
    return slots, order, start


def _row_norms(x: Tensor) -> Tensor:
    """Norm of each token, B N.

    Computed outside the kernels: torch.compile fuses it with a layer norm that reads x anyway, and the kernels, which
    then only multiply x, prefetch it.
    """
    return torch.linalg.vector_norm(x, dim=2, dtype=torch.float32)


def _scores_tile(x: Tensor, larger_side: int) -> ScoresTile:
    is_float32 = x.element_size() == 4
    fills_gpu = not is_symbolic(larger_side) and larger_side > FILL_GPU
    if x.shape[0] == 1 and not fills_gpu:
        return SINGLE_IMAGE_TILE_FLOAT32 if is_float32 else SINGLE_IMAGE_TILE
    if is_float32:
        return TILE_FLOAT32
    return LARGE_TILE if fills_gpu else TILE
