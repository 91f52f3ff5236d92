"""What fusing costs in vectors: cosine to the unfused model's, and the nearest neighbors that stay the same.

Axes: N images, D of the vector, k neighbors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.loader import load_batches
from ..data.resources import num_workers
from ..errors import MctfError
from ..evaluation.timing import ThroughputMeter
from .embedder import Embedder
from .pipeline import ItemLoader, collate
from .sources import Source

NEIGHBORS = (1, 10)
_ROWS = 512  # of the matrix of cosines at once


@dataclass(frozen=True)
class Recall:
    """Share of the k nearest images by unfused vectors that are among the k nearest by fused ones.

    among_others: the query image is not counted. with_query: it is, as the nearest of itself. mixed: the query is
    fused and the others are unfused, as for an index that exists already; the query image is not counted.
    """

    among_others: float
    with_query: float
    mixed: float


@dataclass(frozen=True)
class Check:
    """Fused against unfused vectors of the same images. recall: by k. speeds in images/s of the model alone."""

    images: int
    failed: int
    cosine_mean: float
    cosine_least: float
    recall: dict[int, Recall]
    fused_speed: float
    unfused_speed: float
    fused_gflops: float
    unfused_gflops: float

    @property
    def speedup(self) -> float:
        return self.fused_speed / self.unfused_speed


def check(
    fused: Embedder,
    unfused: Embedder,
    source: Source,
    count: int,
    *,
    workers: int | None = None,
    stop_on_corrupt: bool = False,
    tick: Callable[[int, str], object] = lambda images, text: None,
) -> Check:
    """Embed `count` images with both models, batch by batch in turns, and compare."""
    device = fused.loaded.device
    items = list(source.sample(count))
    batches = [items[start : start + fused.batch_size] for start in range(0, len(items), fused.batch_size)]
    load = ItemLoader(source, fused.transform, on_gpu=False, stop=stop_on_corrupt)
    loaders = num_workers(len(batches), device=device, requested=workers)
    meters = {True: ThroughputMeter(), False: ThroughputMeter()}
    vectors: dict[bool, list[Tensor]] = {True: [], False: []}
    failed, first = 0, ""
    for turn, batch in enumerate(load_batches(load, batches, collate, workers=loaders)):
        if batch.unavailable is not None:
            raise MctfError(batch.unavailable)
        failed += len(batch.failures)
        first = first or next((reason for _, _, reason in batch.failures), "")
        if batch.pixels is None:
            continue
        pixels = batch.pixels.to(device)
        for is_fused in (True, False) if turn % 2 else (False, True):
            embedder = fused if is_fused else unfused
            run = lambda embedder=embedder, pixels=pixels: embedder.run(pixels, pad=True)  # noqa: E731
            output = meters[is_fused].run(run, images=fused.batch_size, device=device)[0]
            vectors[is_fused].append(output.cpu())
        tick(len(batch.keys) + len(batch.failures), "")
    if not vectors[True]:
        raise MctfError(f"none of {len(items)} images is readable, the first: {first}")
    ours, theirs = (F.normalize(torch.cat(vectors[each]).double(), dim=1) for each in (True, False))
    if len(ours) < 2:
        raise MctfError("one image has no neighbors: check at least 2 images")
    cosine = (ours * theirs).sum(dim=1)
    return Check(
        images=len(ours),
        failed=failed,
        cosine_mean=cosine.mean().item(),
        cosine_least=cosine.min().item(),
        recall=recall(ours, theirs, [k for k in NEIGHBORS if k < len(ours)]),
        fused_speed=meters[True].images_per_second,
        unfused_speed=meters[False].images_per_second,
        fused_gflops=fused.loaded.facts["gflops"],
        unfused_gflops=unfused.loaded.facts["gflops"],
    )


def recall(fused: Tensor, unfused: Tensor, neighbors: Sequence[int]) -> dict[int, Recall]:
    """Recall by k of all images as queries: N D of length 1, twice."""
    hits = {k: np.zeros(3) for k in neighbors}
    for start in range(0, len(fused), _ROWS):
        rows = slice(start, start + _ROWS)
        own = torch.arange(start, min(start + _ROWS, len(fused)))[:, None]
        expected, got, mixed = unfused[rows] @ unfused.T, fused[rows] @ fused.T, fused[rows] @ unfused.T
        pairs = [(expected, got), (expected, mixed)]
        for k in neighbors:
            hits[k][1] += _shared(*pairs[0], k)
        for each in (expected, got, mixed):
            each.scatter_(1, own, -torch.inf)
        for k in neighbors:
            hits[k][0] += _shared(*pairs[0], k)
            hits[k][2] += _shared(*pairs[1], k)
    return {k: Recall(*(hits[k] / (k * len(fused))).tolist()) for k in neighbors}


def _shared(expected: Tensor, got: Tensor, k: int) -> int:
    """How many of the k largest of both are the same."""
    first, second = expected.topk(k).indices, got.topk(k).indices
    return int((first[:, :, None] == second[:, None, :]).sum())


def facts(check: Check) -> dict[str, Any]:
    """The check as JSON."""
    return {
        "images": check.images,
        "failed": check.failed,
        "cosine": {"mean": check.cosine_mean, "least": check.cosine_least},
        "recall": {
            str(k): {"among_others": each.among_others, "with_query": each.with_query, "mixed": each.mixed}
            for k, each in check.recall.items()
        },
        "images_per_second": {"fused": check.fused_speed, "unfused": check.unfused_speed},
        "speedup": check.speedup,
        "gflops": {"fused": check.fused_gflops, "unfused": check.unfused_gflops},
    }
