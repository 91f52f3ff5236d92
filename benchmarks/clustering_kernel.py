"""Time of the two clustering kernels on a GPU, on tokens of real images.

    python benchmarks/clustering_kernel.py --weights deit_tiny.safetensors --data imagenet-sample-500.zip

The tokens are those that the fusing blocks of DeiT-Tiny get at 56 % of the FLOPs, 48 images repeated to a batch of 256,
in bfloat16, their 192 channels repeated to 384.

Axes: B images, N tokens, n of them unprotected, C channels.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

import mctf
from mctf import kernels
from mctf.data import Preprocessing, open_dataset
from mctf.kernels import clustering
from mctf.kernels.launch import ceil_div, next_power_of_2
from mctf.models.loading import load_model

IMAGES, BATCH, REPEATED_CHANNELS, ROUNDS = 48, 256, 2, 4


@torch.inference_mode()
def fused_tokens(weights: Path, data: str) -> list[tuple[Tensor, Tensor, int]]:
    """What every clustering of a pass is given: tokens (B N C), weights (B N), r."""
    model = load_model("deit_tiny_patch16_224", weights=weights)
    transform = Preprocessing.of(model).transform()
    images = torch.stack([transform(each) for _, each in open_dataset(data).spaced(IMAGES).readable(skip=False)])
    seen, cluster = [], kernels.cluster

    def spy(x: Tensor, received: Tensor, sizes: Tensor | None, **options: int):
        assignment, a, token_weights = cluster(x, received, sizes, **options)
        seen.append((x, token_weights.float(), options["r"]))
        return assignment, a, token_weights

    kernels.cluster = spy
    mctf.fuse(model, "ward", flops=0.56)(images)
    kernels.cluster = cluster
    return seen


def microseconds(function) -> float:
    from triton.testing import do_bench

    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return 1e3 * do_bench(graph.replay, warmup=5, rep=20, quantiles=[0.5])


def measure(x: Tensor, weights: Tensor, r: int) -> tuple[float, float]:
    """us of both kernels: the distances with each token's first partners, then all rounds."""
    from mctf.kernels.triton.clustering import partners_kernel, rounds_kernel

    copies, tile = ceil_div(BATCH, len(x)), clustering.SMALL_TILE
    x = x.cuda().bfloat16().repeat(copies, 1, REPEATED_CHANNELS)[:BATCH].contiguous()
    weights = weights.cuda().repeat(copies, 1)[:BATCH].contiguous()
    batch, tokens, channels = x.shape
    n = tokens - 1
    tiles, pitch = ceil_div(n, tile.rows), ceil_div(n, clustering.PITCH) * clustering.PITCH
    joining = max(16, next_power_of_2(ceil_div(r, ROUNDS)))
    inverse_norms, inverse_weights = 1 / x.float().norm(dim=2), 1 / weights
    distances = x.new_empty((batch, n, pitch), dtype=torch.float16)
    pairs = x.new_empty((batch, tiles, n), dtype=torch.int32)
    scratch, order = (x.new_empty((batch, size), dtype=torch.int32) for size in (n, tokens))
    start = x.new_empty((batch, tokens - r + 1), dtype=torch.int32)
    slots = x.new_empty((batch, tokens), dtype=torch.int64)

    def find_partners() -> None:
        partners_kernel[(tiles * (tiles + 1) // 2, batch)](
            x, inverse_norms, inverse_weights, distances, pairs, tokens, channels, n, pitch, 1, *x.stride()[:2],
            WIDE=False, TILE=tile.rows, TILES=tiles, CHUNK=tile.channels, PRECISION="tf32", num_warps=tile.warps,
        )  # fmt: skip

    find_partners()
    originals = [(each, each.clone()) for each in (distances, pairs)]

    def restore() -> None:
        for each, original in originals:
            each.copy_(original)

    def run_rounds() -> None:
        restore()
        rounds_kernel[(batch,)](
            distances, weights, inverse_weights, pairs, scratch, slots, order, start,
            tokens, n, pitch, r, ROUNDS, 1,
            WIDE=False, TILES=tiles, N=max(16, next_power_of_2(n)), K=joining, HOPS=joining.bit_length() - 1,
            ROWS=clustering.SEARCHED, PROTECTED=clustering.MAX_PROTECTED, num_warps=4 if joining == 16 else 8,
        )  # fmt: skip

    return microseconds(find_partners), microseconds(run_rounds) - microseconds(restore)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", required=True)
    options = parser.parse_args()
    for tokens, token_weights, r in fused_tokens(options.weights, options.data):
        distances, rounds = measure(tokens, token_weights, r)
        print(f"N={tokens.shape[1]} r={r}: distances {distances:.0f} us, {ROUNDS} rounds {rounds:.0f} us")
