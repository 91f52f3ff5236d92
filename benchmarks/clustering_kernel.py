"""Time of the clustering kernels on a GPU, on tokens of real images.

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
from mctf.core.clustering import num_candidates
from mctf.data import Preprocessing, open_dataset
from mctf.kernels import clustering
from mctf.kernels.launch import ceil_div
from mctf.models.loading import load_model

IMAGES, BATCH, REPEATED_CHANNELS, ROUNDS, CANDIDATES, REPEATS = 48, 256, 2, 2, 1.5, 20


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


def measure(x: Tensor, weights: Tensor, r: int) -> dict[str, float]:
    """Microseconds of each kernel of a clustering, by its name."""
    from torch.profiler import ProfilerActivity, profile

    copies = ceil_div(BATCH, len(x))
    x = x.cuda().bfloat16().repeat(copies, 1, REPEATED_CHANNELS)[:BATCH].contiguous()
    weights = weights.cuda().repeat(copies, 1)[:BATCH].contiguous()
    candidates = num_candidates(r, x.shape[1] - 1, CANDIDATES)

    def run() -> None:
        clustering.cluster(x, weights, r, 1, ROUNDS, candidates)

    run()  # compiles
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize()
    return {
        each.key: each.device_time_total / REPEATS for each in recorded.key_averages() if each.key.endswith("_kernel")
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", required=True)
    options = parser.parse_args()
    for tokens, token_weights, r in fused_tokens(options.weights, options.data):
        times = ", ".join(f"{name} {time:.0f} us" for name, time in measure(tokens, token_weights, r).items())
        print(f"N={tokens.shape[1]} r={r}: {times}")
