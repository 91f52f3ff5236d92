"""Clustering on the GPU: the operator `mctf::cluster`, whose plain version is `core.clustering`.

Up to 256 tokens take two launches (`triton/clustering.py`), more tokens four per round (`triton/clustering_large.py`).

Axes: B images, N tokens, n of them unprotected, M slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.clustering import joining_per_round
from .launch import ceil_div, is_symbolic, launchable, next_power_of_2
from .matching import RANK_TILE

MAX_ONE_PROGRAM = 256  # unprotected tokens whose rounds one program runs
MAX_CANDIDATES = 128  # of such a program
MAX_TOKENS = 16384  # unprotected ones that a program ranks
MAX_PROTECTED = 16


class DistancesTile(NamedTuple):
    """Rows, columns and channels of distances that a program takes at a time, and its warps."""

    rows: int
    columns: int
    channels: int
    warps: int


# with up to 256 tokens
SMALL_TILE, SMALL_TILE_FLOAT32 = DistancesTile(64, 64, 64, 4), DistancesTile(64, 64, 32, 4)
# the first search among more: 4 images of 4,096 tokens and 384 channels take 123 us on an H200, 166 us with 8 warps
TILE, TILE_FLOAT32 = DistancesTile(128, 128, 64, 4), DistancesTile(64, 64, 32, 4)
LISTED_TILE, LISTED_TILE_FLOAT32 = DistancesTile(64, 128, 64, 4), DistancesTile(32, 64, 32, 4)  # of a few rows
LISTED_SPLITS = 32  # programs that share the columns of a few rows
ROWS_AT_A_TIME = 16  # of candidates, in a program of all rounds: tensor cores take no fewer
PITCH = 16  # rows of distances begin at multiples of it: several numbers per load and store


def fits(tokens: int, protected: int) -> bool:
    """Whether the kernels can cluster this many tokens."""
    return 2 <= tokens - protected <= MAX_TOKENS and protected <= MAX_PROTECTED


@torch.library.triton_op("mctf::cluster", mutates_args=())
def cluster(
    x: Tensor, weights: Tensor, r: int, protected: int, rounds: int, candidates: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Slot of each token (B N, int64), tokens sorted by slot (B N, int32), where each slot begins there (B M+1).

    x: B N C; weights: B N, above 0. candidates: at least r and at most the unprotected tokens.
    """
    x, weights = x.contiguous(), weights.contiguous()
    batch, tokens, _ = x.shape
    slots = x.new_empty((batch, tokens), dtype=torch.int64)
    order = x.new_empty((batch, tokens), dtype=torch.int32)
    start = x.new_empty((batch, tokens - r + 1), dtype=torch.int32)
    if tokens - protected <= MAX_ONE_PROGRAM and candidates <= MAX_CANDIDATES:
        _cluster_few(x, weights, r, protected, rounds, candidates, (slots, order, start))
    else:
        _cluster_many(x, weights, r, protected, rounds, candidates, (slots, order, start))
    return slots, order, start


def _cluster_few(
    x: Tensor, weights: Tensor, r: int, protected: int, rounds: int, candidates: int, out: tuple[Tensor, Tensor, Tensor]
) -> None:
    from .triton.clustering import distances_kernel, rounds_kernel

    slots, order, start = out
    batch, tokens, channels = x.shape
    n = tokens - protected
    is_float32 = x.element_size() == 4
    tile = SMALL_TILE_FLOAT32 if is_float32 else SMALL_TILE
    tiles = ceil_div(MAX_ONE_PROGRAM if is_symbolic(n) else n, tile.rows)
    pitch = ceil_div(n, PITCH) * PITCH
    # reduced precision: rounding a distance, at most 4, to float16 adds less than the tokens' own rounding
    distances = x.new_empty((batch, n, pitch), dtype=torch.float32 if is_float32 else torch.float16)
    lowest = x.new_empty((batch, tiles, n), dtype=torch.float32)
    launchable(distances_kernel)[(tiles * (tiles + 1) // 2, batch)](
        x, 1 / _row_norms(x).clamp_min(1e-30), weights, distances, lowest,
        tokens, channels, n, pitch, protected, *x.stride()[:2],
        TILE=tile.rows, TILES=tiles, CHUNK=tile.channels,
        PRECISION="tf32x3" if is_float32 else "tf32", num_warps=tile.warps,
    )  # fmt: skip
    width = MAX_ONE_PROGRAM if is_symbolic(n) else max(16, next_power_of_2(n))
    listed = MAX_CANDIDATES if is_symbolic(candidates) else max(16, next_power_of_2(candidates))
    rows, targets = (x.new_empty((batch, listed), dtype=torch.int32) for _ in range(2))
    scores = x.new_empty((batch, listed), dtype=torch.float32)
    most = listed if is_symbolic(r) else max(16, next_power_of_2(max(joining_per_round(r, rounds))))
    launchable(rounds_kernel)[(batch,)](
        distances, weights, lowest, rows, scores, targets, slots, order, start,
        tokens, n, pitch, r, rounds if is_symbolic(r) else min(rounds, r), candidates, protected,
        WIDE=is_float32, TILES=tiles, N=width, K=listed, J=most, ROWS=ROWS_AT_A_TIME, PROTECTED=MAX_PROTECTED,
        num_warps=4 if most <= 32 else 8,  # 197 tokens, 26 of which join: 32 us on an H200, 41 us with 8 warps
    )  # fmt: skip


def _cluster_many(
    x: Tensor, weights: Tensor, r: int, protected: int, rounds: int, candidates: int, out: tuple[Tensor, Tensor, Tensor]
) -> None:
    from .triton.clustering_large import (
        centers_kernel,
        cluster_slots_kernel,
        first_search_kernel,
        search_kernel,
        select_kernel,
    )
    from .triton.matching_large import members_kernel

    slots, order, start = out
    batch, tokens, channels = x.shape
    n = tokens - protected
    is_float32 = x.element_size() == 4
    # numbers up to 1 in reduced precision: float16 has three more bits than bfloat16
    centers = x[:, protected:] / _row_norms(x)[:, protected:, None].clamp_min(1e-30)
    centers = centers.to(torch.float32 if is_float32 else torch.float16).contiguous()
    squares = centers.float().square().sum(2)
    mass = weights[:, protected:].clone(memory_format=torch.contiguous_format)
    staying = torch.empty_like(mass)
    pairs = torch.full((batch, n), 0x7F800000 << 32, dtype=torch.int64, device=x.device)
    joined, merged_tokens = (x.new_empty((batch, r), dtype=torch.int32) for _ in range(2))
    is_candidate, rows, again = (x.new_empty((batch, n), dtype=torch.int32) for _ in range(3))
    counts, again_counts = (x.new_empty(batch, dtype=torch.int32) for _ in range(2))
    is_joined = x.new_zeros((batch, n), dtype=torch.int32)
    width = MAX_TOKENS if is_symbolic(n) else next_power_of_2(n)
    tile, listed_tile = (TILE_FLOAT32, LISTED_TILE_FLOAT32) if is_float32 else (TILE, LISTED_TILE)
    tiles, precision = ceil_div(n, tile.rows), "tf32x3" if is_float32 else "tf32"

    def search(lines: Tensor, lengths: Tensor) -> None:
        launchable(search_kernel)[(ceil_div(n, listed_tile.rows), LISTED_SPLITS, batch)](
            centers, squares, mass, staying, pairs, lines, lengths, channels, n, LISTED_SPLITS,
            WIDE=is_float32, ROWS=listed_tile.rows, COLUMNS=listed_tile.columns, CHUNK=listed_tile.channels,
            PRECISION=precision, num_warps=listed_tile.warps,
        )  # fmt: skip

    launchable(first_search_kernel)[(tiles * (tiles + 1) // 2, batch)](
        centers, squares, mass, pairs, channels, n,
        WIDE=is_float32, TILE=tile.rows, CHUNK=tile.channels, PRECISION=precision, num_warps=tile.warps,
    )  # fmt: skip
    all_k = list(joining_per_round(r, rounds))
    done = 0
    for number, k in enumerate(all_k):
        first, final = number == 0, number + 1 == len(all_k)
        if not first:
            search(rows, counts)
        launchable(select_kernel)[(batch,)](
            pairs, mass, staying, is_candidate, joined, merged_tokens, rows, counts, again, again_counts,
            tokens, n, k, done, candidates, r, protected,
            FIRST=first, FINAL=final, N=width, num_warps=16 if width >= 4096 else 8,
        )  # fmt: skip
        search(again, again_counts)
        if not final:
            launchable(centers_kernel)[(k, batch)](
                centers, squares, mass, staying, pairs, joined, channels, n, k, done, r,
                K=MAX_TOKENS if is_symbolic(k) else max(16, next_power_of_2(k)), CHANNELS=next_power_of_2(channels),
                num_warps=4,
            )  # fmt: skip
        done += k
    launchable(cluster_slots_kernel)[(batch,)](
        pairs, joined, slots, is_joined, tokens, n, r, protected,
        N=width, R=MAX_TOKENS if is_symbolic(r) else next_power_of_2(r), HOPS=(len(all_k) - 1).bit_length(),
        PROTECTED=MAX_PROTECTED, num_warps=16 if width >= 4096 else 8,
    )  # fmt: skip
    launchable(members_kernel)[(ceil_div(tokens, RANK_TILE["BLOCK"]), batch)](
        slots, merged_tokens, order, start, tokens, tokens - r, **RANK_TILE
    )


def _row_norms(x: Tensor) -> Tensor:
    """Norm of each token, B N; outside the kernels, as torch.compile fuses it with a layer norm that reads x anyway."""
    return torch.linalg.vector_norm(x, dim=2, dtype=torch.float32)
