"""Clustering on the GPU: the operator `mctf::cluster`, whose plain version is `core.clustering`.

Axes: B images, N tokens, n of them unprotected, M slots.
"""

import torch
from torch import Tensor

from .launch import ceil_div, is_symbolic, launchable, next_power_of_2

MAX_TOKENS = 256  # unprotected ones that a program holds
MAX_JOINING = 32  # in one round
MAX_PROTECTED = 16
PITCH = 16  # rows of distances begin at multiples of it: several numbers per load and store
TILE, TILE_FLOAT32 = 128, 64  # rows and columns of distances per program
PARTNERS_TILE = {"ROWS": 16, "COLUMNS": 128}


def fits(tokens: int, protected: int, r: int, rounds: int) -> bool:
    """Whether the kernels can cluster this many tokens."""
    joining = ceil_div(r, rounds)
    return 2 <= tokens - protected <= MAX_TOKENS and protected <= MAX_PROTECTED and joining <= MAX_JOINING and r >= 1


@torch.library.triton_op("mctf::cluster", mutates_args=())
def cluster(x: Tensor, weights: Tensor, r: int, protected: int, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slot of each token (B N, int64), tokens sorted by slot (B N, int32), where each slot begins there (B M+1).

    x: B N C; weights: B N, above 0.
    """
    from .triton.clustering import distances_kernel, join_kernel, partners_kernel, slots_kernel

    x, weights = x.contiguous(), weights.contiguous()
    batch, tokens, channels = x.shape
    n = tokens - protected
    is_float32 = x.element_size() == 4
    tile = TILE_FLOAT32 if is_float32 else TILE
    side = ceil_div(n, tile)
    pitch = ceil_div(n, PITCH) * PITCH
    norms = torch.linalg.vector_norm(x, dim=2, dtype=torch.float32)
    distances = x.new_empty((batch, n, pitch), dtype=torch.float32)
    launchable(distances_kernel)[(side * (side + 1) // 2, batch)](
        x, norms, distances, tokens, channels, n, pitch, protected, *x.stride()[:2],
        A=tile, CHUNK=32 if is_float32 else 64, PRECISION="tf32x3" if is_float32 else "tf32", num_warps=4,
    )  # fmt: skip
    joining = MAX_JOINING if is_symbolic(r) else max(16, next_power_of_2(ceil_div(r, rounds)))
    width = MAX_TOKENS if is_symbolic(n) else max(16, next_power_of_2(n))
    mass = weights[:, protected:].clone(memory_format=torch.contiguous_format)
    best = x.new_empty((batch, n), dtype=torch.float32)
    partner, parent = (x.new_empty((batch, n), dtype=torch.int32) for _ in range(2))
    root = torch.arange(n, dtype=torch.int32, device=x.device).repeat(batch, 1)
    joined = x.new_empty((batch, joining), dtype=torch.int32)
    mixed = x.new_empty((batch, joining, width), dtype=torch.float32)
    for number in range(rounds):
        k = (r + rounds - 1 - number) // rounds  # r in equal parts, the remainder in the first rounds
        launchable(partners_kernel)[(ceil_div(n, PARTNERS_TILE["ROWS"]), batch)](
            distances, mass, best, partner, n, pitch, **PARTNERS_TILE, num_warps=4
        )
        launchable(join_kernel)[(batch,)](
            distances, mass, best, partner, root, parent, joined, mixed, n, pitch, k,
            UPDATE=number < rounds - 1, N=width, K=joining, HOPS=joining.bit_length() - 1,
            num_warps=4,
        )  # fmt: skip
    slots = x.new_empty((batch, tokens), dtype=torch.int64)
    order = x.new_empty((batch, tokens), dtype=torch.int32)
    start = x.new_empty((batch, tokens - r + 1), dtype=torch.int32)
    launchable(slots_kernel)[(batch,)](
        root, parent, slots, order, start, tokens, n, r, protected,
        N=width, PROTECTED=MAX_PROTECTED, num_warps=2,
    )  # fmt: skip
    return slots, order, start
