"""How far the class token drifts, block by block, from what it is in the plain model (paper, appendix, Table B).

The cosine is between the class tokens of the residual stream after each block, fused and plain, in the mean over
images; near 1 means that little was lost. After the last block the cosine of single images is kept as well.

Axes: B images, L blocks, C channels.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..api import fuse, fused_stack
from ..core.assignment import Assignment
from ..hosts import find_host
from ..methods.base import BlockContext, BlockOps, BlockOutput
from ..methods.mctf import MCTF
from ..models.loading import copy_sharing_weights
from ..tracing import trace
from .runner import Experiment, Result, Subject, Task
from .studies import ALL, R, options_of

CRITERIA = ("sim", "info", "size", "sim+info", ALL)


class ClassToken(Experiment):
    """Under every set of criteria that the paper lists."""

    name = "class_token"
    title = "What the class token loses"
    measures = f"Cosine between the class tokens of the fused and the plain model after each block, r = {R}."
    sources = ("Table B",)
    form: ClassVar[int] = 2

    def steps(self, task: Task) -> int:
        return len(task.seen.batches) * (1 + len(CRITERIA))

    def unsuited(self, subject: Subject) -> str | None:
        return None if find_host(subject.model).class_token else "the model has no class token"

    @torch.inference_mode()
    def run(self, task: Task) -> Result:
        model = task.seen.model
        plain = fuse(copy_sharing_weights(model), r=0).eval()
        fused = {name: fuse(copy_sharing_weights(model), r=R, **options_of(name)).eval() for name in CRITERIA}
        seen: dict[str, list[Tensor]] = {name: [] for name in CRITERIA}
        for batch in task.batches(1 + len(CRITERIA)):
            pixels = task.seen.to_model(batch.pixels)
            reference = class_tokens(plain, pixels)
            for name, each in fused.items():
                seen[name].append(F.cosine_similarity(class_tokens(each, pixels), reference, dim=2))
        whole = {name: torch.cat(parts) for name, parts in seen.items()}
        cosine = {name: found.mean(dim=0).tolist() for name, found in whole.items()}
        last = {name: found[:, -1].tolist() for name, found in whole.items()}
        return {"images": len(task.seen), "r": R, "cosine": cosine, "last": last}


def class_tokens(model: nn.Module, pixels: Tensor) -> Tensor:
    """The class token after each block of a fused model: B L C, float64 on the CPU."""
    observer = _Watcher()
    with fused_stack(model).observed_by(observer):
        model(pixels)
    return torch.stack(observer.tokens, dim=1).cpu().double()


class _Watcher:
    def __init__(self) -> None:
        self.tokens: list[Tensor] = []

    def record(self, index: int, x: Tensor, step: BlockOutput) -> None:
        self.tokens.append(step.x[:, 0])


def order(cosine: Mapping[str, Sequence[float]]) -> list[str]:
    """Criteria from the one that loses least after the last block to the one that loses most."""
    return sorted(cosine, key=lambda name: -cosine[name][-1])


# MERGED from mctf.reproduce.analyses:
# How large the largest token gets, with and without the criterion of size (paper, section 4.3, Figure 9).
#
# Axes: B images.

CASES = {"with_size": ALL, "without_size": "sim+info"}


class LargestToken(Experiment):
    """One number an image and case: how many input tokens the largest token stands for after the last block."""

    name = "largest_token"
    title = "How large tokens get"
    measures = f"Size of the largest token after the last block, with and without the size criterion, r = {R}."
    sources = ("Figure 9",)

    def steps(self, task: Task) -> int:
        return len(task.seen.batches) * len(CASES)

    @torch.inference_mode()
    def run(self, task: Task) -> Result:
        model = task.seen.model
        fused = {case: fuse(copy_sharing_weights(model), r=R, **options_of(name)) for case, name in CASES.items()}
        sizes: dict[str, list[int]] = {case: [] for case in CASES}
        for batch in task.batches(len(CASES)):
            pixels = task.seen.to_model(batch.pixels)
            for case, each in fused.items():
                sizes[case] += largest(each.eval(), pixels).tolist()
        return {"images": len(task.seen), "r": R, "sizes": sizes}


def largest(model: nn.Module, pixels: Tensor) -> Tensor:
    """Size of the largest token of each image after the last block of a fused model: B, int64."""
    with trace(model) as watched:
        model(pixels)
    return watched.blocks[-1].sizes.amax(dim=1).round().long().cpu()


# MERGED from mctf.reproduce.analyses:
# The attention of fused tokens as the paper approximates it, beside the precise one (paper, appendix, Figure A).
#
# Both are of the same fused tokens, those of MCTF as it runs. Approximated is what MCTF uses: the attention before
# fusion, columns summed and rows averaged. Precise is computed anew from the fused tokens.
#
# Axes: B images, H heads, N tokens entering a block, M leaving it.


@dataclass(frozen=True)
class Maps:
    """Both maps of one block, B H M M each; rows sum to 1."""

    approximated: Tensor
    precise: Tensor

    def distance(self) -> Tensor:
        """Share of the attention that goes elsewhere, in the mean over heads and rows: B, from 0 to 1."""
        return (self.approximated - self.precise).abs().sum(dim=3).mean(dim=(1, 2)) / 2


@dataclass(frozen=True)
class _Compared(MCTF):
    """MCTF that also works out both maps of every block that fuses; `seen` has them by block."""

    seen: dict[int, Maps] = field(default_factory=dict, hash=False, compare=False)

    name: ClassVar[str] = "mctf"

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        step = super().run(block, x, sizes, ctx)
        if step.assignment is not None and step.weights is not None:
            self.seen[ctx.index] = both_maps(block, x, sizes, step.assignment, step.weights)
        return step


@contextmanager
def compared(model: nn.Module) -> Iterator[dict[int, Maps]]:
    """While open, a model fused by "mctf" with its default options leaves both maps of each block here when it runs."""
    stack = fused_stack(model)
    own, watching = stack.method, _Compared()
    stack.method = watching
    try:
        yield watching.seen
    finally:
        stack.method = own


@torch.no_grad()
def both_maps(block: BlockOps, x: Tensor, sizes: Tensor | None, assignment: Assignment, weights: Tensor) -> Maps:
    """The maps of a block that is given x (B N C) with these sizes (B N) and fuses it so."""
    full = block.attention_map(*block.queries_keys(block.norm1(x)), sizes=sizes)
    counts = torch.ones_like(weights) if sizes is None else sizes
    fused = block.fused(assignment, weights)
    queries, keys = fused.queries_keys(fused.norm1(kernels.pool(x, weights, assignment)))
    return Maps(
        approximate(full, assignment, weights),
        fused.attention_map(queries, keys, sizes=assignment.total(counts)),
    )


def approximate(full: Tensor, assignment: Assignment, weights: Tensor) -> Tensor:
    """A_hat[p, u] = sum_{i in p} w_i (sum_{j in u} A_ij) / sum_{i in p} w_i: B H N N -> B H M M."""
    batch, heads, tokens, _ = full.shape
    columns = assignment.sum(full.permute(0, 3, 1, 2).flatten(2)).view(batch, -1, heads, tokens)  # B M H N
    rows = assignment.pool(columns.permute(0, 3, 2, 1).flatten(2), weights)  # B M (H M)
    return rows.view(batch, assignment.count, heads, assignment.count).transpose(1, 2)
