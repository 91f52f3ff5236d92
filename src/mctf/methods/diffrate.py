"""DiffRate: the least attended tokens are dropped, the next ones merged, by schedules learned per block.

Chen et al., "DiffRate: Differentiable Compression Rate for Efficient Vision Transformers", ICCV 2023. Between attention
and MLP the class token's attention, averaged over heads, sorts the tokens. The last ones are dropped. The next ones
join the most similar (cosine) of those that stay, whose mean with all that join is not weighted; its size grows by
size * cosine of each. Attention is proportional to these sizes.

How many tokens each block drops and merges was learned on ImageNet, and is published for DeiT-T, -S and -B at five
costs each (`data_files/diffrate_schedules.json`, counts with the class token).

Choices where nothing is published: between two costs, shares of tokens are interpolated, and so they are over the
depth of other models; the last block, after which the class token alone is read, keeps its own. Distillation and
register tokens stay in place like the class token. A negative cosine counts as 0. Dropped tokens map to the most
similar one that stays, with weight 0.

Axes: B images, N tokens, n of them unprotected, M after the block, m of them unprotected, C channels.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import accumulate, pairwise
from math import floor
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from .. import kernels
from ..core.assignment import Assignment
from ..core.flops import BlockShape
from ..core.matching import rank_descending, unit_rows
from ..core.schedule import Amount, ReductionSpec, plain_r
from ..errors import MctfError, did_you_mean, shown
from .base import BlockContext, BlockOps, BlockOutput, Method, check_bool, check_class_token, run_unfused

Points = tuple[tuple[float, float], ...]  # x and y of a piecewise linear function, x rising


@dataclass(frozen=True)
class Published:
    """The schedules of one model.

    kept: per block, the share of unprotected tokens after it by the share of FLOPs saved.
    dropped: per block, the dropped share of the removed tokens by the removed share of the block's tokens.
    """

    channels: int
    kept: tuple[Points, ...]
    dropped: tuple[Points, ...]

    @classmethod
    def read(cls, entry: dict[str, Any]) -> Self:
        """From the file's entry of one model."""
        channels, patches = entry["channels"], entry["tokens"] - 1
        shape = BlockShape(channels, channels, channels // 64, mlp=8 * channels**2, norms=channels)
        stem = patches * 768 * channels
        depth = len(entry["schedules"][0]["kept_after_merging"])
        kept: list[list[tuple[float, float]]] = [[(0.0, 1.0), (1.0, 0.0)] for _ in range(depth)]
        dropped: list[dict[float, float]] = [{} for _ in range(depth)]
        for schedule in entry["schedules"]:
            # a few counts exceed those of the block before
            counts = list(accumulate(schedule["kept_after_merging"], min, initial=entry["tokens"]))
            macs = sum(shape.attention_branch(before) + shape.mlp_branch(after) for before, after in pairwise(counts))
            saved = 1 - (stem + macs) / (stem + depth * shape.plain(entry["tokens"]))
            for block, (before, after) in enumerate(pairwise(counts)):
                kept[block].append((saved, (after - 1) / patches))
                if after < before:
                    pruned = max(0, before - schedule["kept_after_pruning"][block])
                    dropped[block][(before - after) / (before - 1)] = pruned / (before - after)
        return cls(
            channels,
            tuple(tuple(sorted(points)) for points in kept),
            tuple(tuple(sorted(points.items())) for points in dropped),
        )

    def ratios(self, saved: float, depth: int) -> list[float]:
        """Per block of a model, the share of its unprotected tokens to be removed, for this share of FLOPs saved."""
        kept = [_interpolate(points, saved) for points in self.kept]
        *inner, last = kept
        positions = tuple((float(block), share) for block, share in enumerate(inner))
        spacing = (len(inner) - 1) / max(1, depth - 2)
        shares = [1.0, *(_interpolate(positions, block * spacing) for block in range(depth - 1)), last]
        # rounding must not lead out of [0, 1)
        return [min(max(0.0, 1 - after / before), 1 - 1e-9) for before, after in pairwise(shares)]

    def num_dropped(self, r: int, unprotected: int, *, index: int, depth: int) -> int:
        """Number of dropped tokens among the r that block `index` removes; the others are merged."""
        inner = len(self.dropped) - 2
        block = inner + 1 if index >= depth - 1 else floor(index * inner / (depth - 2) + 0.5) if depth > 2 else 0
        points = self.dropped[block]
        return floor(r * _interpolate(points, r / unprotected) + 0.5) if points else 0


def _interpolate(points: Points, x: float) -> float:
    """The piecewise linear function through the points, constant before the first and after the last."""
    if x <= points[0][0]:
        return points[0][1]
    for (low, at_low), (high, at_high) in pairwise(points):
        if x <= high:
            return at_high if x == high else at_low + (at_high - at_low) * (x - low) / (high - low)
    return points[-1][1]


PUBLISHED = {
    name: Published.read(entry)
    for name, entry in json.loads(
        (files("mctf") / "data_files" / "diffrate_schedules.json").read_text(encoding="utf-8")
    ).items()
}


@dataclass(frozen=True)
class DiffRate(Method):
    """A single ratio r is the share of FLOPs to be saved, by the published schedules: 0.42, the default, is their 0.7 G
    of DeiT-T. A count, or one amount per block, is the number of tokens that a block removes, as in other methods.
    Either way each block drops as large a part of them as the published schedules do there, and merges the rest.

    published: the model whose schedules are used: "tiny", "small", "base"; "auto" is the closest in width.
    prune: drop tokens as published; otherwise all that would be dropped are merged too.
    proportional: add log(size) to the attention logits of merged keys.
    """

    published: str = "auto"
    prune: bool = True
    proportional: bool = True

    name: ClassVar[str] = "diffrate"
    summary: ClassVar[str] = "DiffRate (ICCV 2023): drops and merges by class attention, on learned schedules"
    default_r: ClassVar[ReductionSpec] = 0.42
    drops: ClassVar[bool] = True

    def __post_init__(self) -> None:
        choices = ("auto", *PUBLISHED)
        if not isinstance(self.published, str) or self.published not in choices:
            word = self.published if isinstance(self.published, str) else shown(self.published)
            raise MctfError(f"published={shown(self.published)} is unknown: {did_you_mean(word, choices)}")
        check_bool(prune=self.prune, proportional=self.proportional)

    def resolve(self, *, class_token: bool) -> Self:
        check_class_token(self.name, class_token)
        return self

    def fit(self, shapes: Callable[[], Sequence[BlockShape]], tokens: Callable[[], int]) -> Self:
        if self.published != "auto":
            return self
        channels = shapes()[0].channels
        ratios = {name: max(each.channels / channels, channels / each.channels) for name, each in PUBLISHED.items()}
        return replace(self, published=min(ratios, key=lambda name: ratios[name]))

    @property
    def _schedules(self) -> Published:
        return PUBLISHED["small" if self.published == "auto" else self.published]

    def make_schedule(self, r: ReductionSpec, *, depth: int, blocks: Iterable[int] | None) -> tuple[Amount, ...]:
        schedule = super().make_schedule(r, depth=depth, blocks=blocks)
        if isinstance(r, (str, Sequence)) or not isinstance(saved := plain_r(r), float):
            return schedule
        ratios = self._schedules.ratios(saved, depth)
        chosen = [bool(amount) for amount in schedule]
        return tuple(ratio if reduces else 0 for ratio, reduces in zip(ratios, chosen, strict=True))

    def default_blocks(self, depth: int) -> range:
        return range(depth)

    def can_trim(self, *, reduces: bool) -> bool:
        return True

    def num_requested(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """The count itself, or that ratio of the unprotected tokens, rounded: floors would add up over the blocks."""
        return amount if isinstance(amount, int) else floor(amount * (tokens - protected) + 0.5)

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """Attention on all N tokens, then dropping and merging, then the MLP on the remaining M."""
        key_sizes = self.key_sizes(sizes)
        if ctx.r == 0:
            return BlockOutput(run_unfused(block, x, key_sizes), sizes)
        h = block.norm1(x)
        q, k, v = block.queries_keys_values(h)
        context, received = block.attend_with_received(q, k, v, sizes=key_sizes, rows="class")
        x = block.add_attention(x, block.finish_context(context, h))
        a = received.sum(dim=1)
        assignment, weights, sizes = _assign(
            x, a, sizes, ctx.r, dropped=self._num_dropped(ctx, x.shape[1]), protected=ctx.protected
        )
        x, _ = kernels.merge(x, assignment, weights=weights)
        return BlockOutput(block.add_mlp(x), sizes, assignment, weights, a)

    def _num_dropped(self, ctx: BlockContext, tokens: int) -> int:
        """Number of dropped tokens among the ctx.r that are removed; the others are merged."""
        if not self.prune:
            return 0
        return self._schedules.num_dropped(ctx.r, tokens - ctx.protected, index=ctx.index, depth=ctx.depth)

    def run_macs(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> int:
        similarity = r * (tokens - r - protected) * shape.channels
        return shape.attention_branch(tokens) + similarity + shape.mlp_branch(tokens - r)


@torch.no_grad()
def _assign(
    x: Tensor, a: Tensor, sizes: Tensor | None, r: int, *, dropped: int, protected: int
) -> tuple[Assignment, Tensor, Tensor]:
    """The assignment of tokens x (B N C) by their importance a (B N), their weights (B N), and the sizes after (B M).

    Slots of the tokens that stay are ordered by importance.
    """
    batch, tokens, channels = x.shape
    stay = tokens - protected - r
    rank = rank_descending(a[:, protected:])
    order = rank.argsort(dim=1)[..., None].expand(-1, -1, channels)
    unit = unit_rows(x[:, protected:].gather(1, order))
    cosine, target = (unit[:, stay:] @ unit[:, :stay].transpose(1, 2)).max(dim=2)  # B r

    position = torch.arange(tokens, device=x.device).expand(batch, -1)
    slots = torch.cat([position[:, protected : protected + stay], protected + target], dim=1).gather(1, rank)
    growth = torch.cat([cosine.new_ones(batch, stay), cosine.clamp(0, 1)], dim=1).float().gather(1, rank)
    kept = torch.cat([position[:, :protected] >= 0, rank < tokens - protected - dropped], dim=1)
    growth = torch.cat([growth.new_ones(batch, protected), growth], dim=1).where(kept, 0)
    assignment = Assignment(torch.cat([position[:, :protected], slots], dim=1), tokens - r)
    return assignment, kept.float(), assignment.total(growth if sizes is None else growth * sizes)
