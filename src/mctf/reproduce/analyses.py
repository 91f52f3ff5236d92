"""Measurements inside the fused model: class tokens, the largest token, and attention maps.

Axes: B images, L blocks, H heads, N tokens before a block, M tokens after it, C channels.
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
from .records import Result
from .runner import Experiment, Subject, Task
from .studies import ALL, R, criteria_options

CRITERIA = ("sim", "info", "size", "sim+info", ALL)
CASES = {"with_size": ALL, "without_size": "sim+info"}


@dataclass(frozen=True)
class ClassTokenResult(Result):
    """cosine: per set of criteria the mean over images after each block. last: of each image after the last block."""

    images: int
    r: int
    cosine: dict[str, tuple[float, ...]]
    last: dict[str, tuple[float, ...]]


class ClassToken(Experiment):
    """Cosine between the class tokens of the fused model and the baseline (paper, appendix, Table B).

    The class tokens are those of the residual stream after each block; a cosine near 1 means little change.
    """

    name = "class_token"
    title = "Class token"
    measures = f"Cosine between the class tokens of the fused model and the baseline after each block, r = {R}."
    sources = ("Table B",)
    result_type = ClassTokenResult
    form: ClassVar[int] = 2

    def steps(self, task: Task) -> int:
        return len(task.subject.batches) * (1 + len(CRITERIA))

    def unsupported(self, subject: Subject) -> str | None:
        return None if find_host(subject.model).class_token else "the model has no class token"

    @torch.inference_mode()
    def run(self, task: Task) -> ClassTokenResult:
        model = task.subject.model
        baseline = fuse(copy_sharing_weights(model), r=0).eval()
        fused = {name: fuse(copy_sharing_weights(model), r=R, **criteria_options(name)).eval() for name in CRITERIA}
        parts: dict[str, list[Tensor]] = {name: [] for name in CRITERIA}
        for batch in task.batches(1 + len(CRITERIA)):
            pixels = task.subject.to_model(batch.pixels)
            reference = class_tokens(baseline, pixels)
            for name, each in fused.items():
                parts[name].append(F.cosine_similarity(class_tokens(each, pixels), reference, dim=2))
        cosine = {name: torch.cat(each) for name, each in parts.items()}  # B L
        return ClassTokenResult(
            images=len(task.subject),
            r=R,
            cosine={name: tuple(each.mean(dim=0).tolist()) for name, each in cosine.items()},
            last={name: tuple(each[:, -1].tolist()) for name, each in cosine.items()},
        )


def class_tokens(model: nn.Module, pixels: Tensor) -> Tensor:
    """The class token after each block of a fused model: B L C, float64 on the CPU."""
    observer = _ClassTokenObserver()
    with fused_stack(model).observed_by(observer):
        model(pixels)
    return torch.stack(observer.tokens, dim=1).cpu().double()


class _ClassTokenObserver:
    def __init__(self) -> None:
        self.tokens: list[Tensor] = []

    def record(self, index: int, x: Tensor, step: BlockOutput) -> None:
        self.tokens.append(step.x[:, 0])


def rank_criteria(cosine: Mapping[str, Sequence[float]]) -> list[str]:
    """Sets of criteria by their cosine after the last block, the highest first."""
    return sorted(cosine, key=lambda name: -cosine[name][-1])


@dataclass(frozen=True)
class LargestTokenResult(Result):
    """sizes: input tokens in the largest token of each image, per case of `CASES`."""

    images: int
    r: int
    sizes: dict[str, tuple[int, ...]]


class LargestToken(Experiment):
    """Size of the largest token with and without the size criterion (paper, section 4.3, Figure 9)."""

    name = "largest_token"
    title = "Largest token"
    measures = f"Size of the largest token after the last block, with and without the size criterion, r = {R}."
    sources = ("Figure 9",)
    result_type = LargestTokenResult

    def steps(self, task: Task) -> int:
        return len(task.subject.batches) * len(CASES)

    @torch.inference_mode()
    def run(self, task: Task) -> LargestTokenResult:
        model = task.subject.model
        fused = {
            case: fuse(copy_sharing_weights(model), r=R, **criteria_options(criteria)).eval()
            for case, criteria in CASES.items()
        }
        sizes: dict[str, list[int]] = {case: [] for case in CASES}
        for batch in task.batches(len(CASES)):
            pixels = task.subject.to_model(batch.pixels)
            for case, each in fused.items():
                sizes[case] += largest_token(each, pixels).tolist()
        return LargestTokenResult(len(task.subject), R, {case: tuple(each) for case, each in sizes.items()})


def largest_token(model: nn.Module, pixels: Tensor) -> Tensor:
    """Size of the largest token of each image after the last block of a fused model: B, int64."""
    with trace(model) as traced:
        model(pixels)
    return traced.blocks[-1].sizes.amax(dim=1).round().long().cpu()


@dataclass(frozen=True)
class AttentionPair:
    """Two attention maps of the fused tokens of one block, B H M M each (paper, appendix, Figure A); rows sum to 1.

    approximated: what MCTF uses, the attention before fusion with columns summed and rows averaged.
    precise: computed from the fused tokens.
    """

    approximated: Tensor
    precise: Tensor

    def distance(self) -> Tensor:
        """Total variation distance, the mean over heads and rows: B, from 0 to 1."""
        return (self.approximated - self.precise).abs().sum(dim=3).mean(dim=(1, 2)) / 2


@contextmanager
def recorded_attention(model: nn.Module) -> Iterator[dict[int, AttentionPair]]:
    """Record both maps of each block that fuses, by block, of a model fused by "mctf" with default options."""
    stack = fused_stack(model)
    method, recording = stack.method, _RecordingMCTF()
    stack.method = recording
    try:
        yield recording.maps
    finally:
        stack.method = method


@dataclass(frozen=True)
class _RecordingMCTF(MCTF):
    """MCTF that also computes both maps of every block that fuses."""

    maps: dict[int, AttentionPair] = field(default_factory=dict, hash=False, compare=False)

    name: ClassVar[str] = "mctf"

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        output = super().run(block, x, sizes, ctx)
        if output.assignment is not None and output.weights is not None:
            self.maps[ctx.index] = attention_pair(block, x, sizes, output.assignment, output.weights)
        return output


@torch.no_grad()
def attention_pair(
    block: BlockOps, x: Tensor, sizes: Tensor | None, assignment: Assignment, weights: Tensor
) -> AttentionPair:
    """Both maps of a block with input x (B N C), sizes (B N) and this assignment."""
    full = block.attention_map(*block.queries_keys(block.norm1(x)), sizes=sizes)
    counts = torch.ones_like(weights) if sizes is None else sizes
    fused = block.fused(assignment, weights)
    x, _ = kernels.merge(x, assignment, weights=weights)
    queries, keys = fused.queries_keys(fused.norm1(x))
    return AttentionPair(
        approximated=approximate_attention(full, assignment, weights),
        precise=fused.attention_map(queries, keys, sizes=assignment.total(counts)),
    )


def approximate_attention(full: Tensor, assignment: Assignment, weights: Tensor) -> Tensor:
    """A_hat[p, u] = sum_{i in p} w_i (sum_{j in u} A_ij) / sum_{i in p} w_i: B H N N -> B H M M."""
    batch, heads, tokens, _ = full.shape
    columns = assignment.sum(full.permute(0, 3, 1, 2).flatten(2)).view(batch, -1, heads, tokens)  # B M H N
    rows = assignment.pool(columns.permute(0, 3, 2, 1).flatten(2), weights)  # B M (H M)
    return rows.view(batch, assignment.count, heads, assignment.count).transpose(1, 2)
