"""DynamicViT: a predictor before a few blocks learns which patches to drop.

Rao et al., "DynamicViT: Efficient Vision Transformers with Dynamic Token Sparsification", NeurIPS 2021. Before blocks
3, 6 and 9 of twelve the predictor reads every patch and the mean of those that are left; of n patches at the start
int(n rho^s) go on after the s-th time, rho = 1 - r. How it learns is in `selecting`.

Choices where the paper is silent: registers stay like the class token; a model that reads every token is given, for a
patch that was dropped, the one before it that was not, in training as in inference.

Axes: B images, N tokens, n of them patches, M kept, C channels.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.flops import NORM, BlockShape, Cost
from ..core.matching import at_least_float32
from ..core.selection import keep_topk
from ._predictor import Decisions, Selecting, decide, ones_for, run_masked, seen_mean
from .base import BlockContext, BlockOps, BlockOutput


@dataclass(frozen=True)
class DynamicViT(Selecting):
    """r = 0.3, the default, keeps 0.7 of the patches, then 0.7^2, then 0.7^3; options as in `Selecting`."""

    name: ClassVar[str] = "dynamic_vit"
    summary: ClassVar[str] = "DynamicViT (NeurIPS 2021), learned: a predictor drops patches before three blocks"

    def share(self, ratio: float, stage: int) -> float:
        return (1 - ratio) ** (stage + 1)

    def make_layer(self, shape: BlockShape) -> nn.Module:
        return Predictor(shape.channels)

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        if ctx.training:
            return self._train(block, x, ctx)
        if ctx.r == 0:
            return BlockOutput(block.plain(x), None)
        patches = x[:, ctx.protected :]
        scores = self.layers_of(ctx)(patches, ones_for(patches))[..., 0]
        kept = keep_topk(scores, patches.shape[1] - ctx.r, protected=ctx.protected)
        x = block.fused(kept.assignment, kept.weights).plain(kept.gather(x))
        return BlockOutput(x, None, kept.assignment, kept.weights)

    def _train(self, block: BlockOps, x: Tensor, ctx: BlockContext) -> BlockOutput:
        decisions: Decisions | None = ctx.method_state
        if ctx.r > 0:
            patches = x[:, ctx.protected :]
            decisions = decisions or Decisions(ones_for(patches), patches.shape[1], ctx.protected)
            log_probabilities = self.layers_of(ctx)(patches, decisions.now)
            decisions = decisions.updated(decide(log_probabilities), ctx.r)
        if decisions is None:
            return BlockOutput(block.plain(x), None)
        return BlockOutput(run_masked(block, x, decisions.seen()), None, method_state=decisions)

    def restore_tokens(self, x: Tensor, method_state: Any) -> Tensor | None:
        """In training, what inference gives to whoever reads every token."""
        return None if method_state is None else torch.take_along_dim(x, _shown(method_state)[..., None], dim=1)

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        cost = shape.plain(tokens - r)
        if r:
            cost += (tokens - protected) * Predictor.cost(shape.channels)
        return Cost(paper=cost, run=cost)


def _shown(decisions: Decisions) -> Tensor:
    """The place of the token that stands for each token in the end, B N: itself, or the one kept before it."""
    stays, protected = decisions.seen().detach() > 0, decisions.protected
    places = torch.arange(stays.shape[1], device=stays.device)
    before = torch.where(stays, places, -1).cummax(dim=1).values
    first = protected + stays[:, protected:].int().argmax(dim=1, keepdim=True)
    return torch.where((places >= protected) & (before < protected), first, before)


class Predictor(nn.Module):
    """How likely each patch is to be kept: half of the channels its own, half the mean over the patches left."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half, quarter = channels // 2, channels // 4
        self.read = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, channels), nn.GELU())
        self.score = nn.Sequential(
            nn.Linear(channels, half), nn.GELU(), nn.Linear(half, quarter), nn.GELU(), nn.Linear(quarter, 2)
        )

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Log-probabilities of keeping and dropping, B n 2, from patches (B n C) of which these are left (B n)."""
        own, common = self.read(x).tensor_split([x.shape[-1] // 2], dim=-1)
        both = torch.cat([own, seen_mean(common, seen).expand(-1, x.shape[1], -1)], dim=-1)
        return at_least_float32(self.score(both)).log_softmax(dim=-1)

    @staticmethod
    def cost(channels: int) -> int:
        """Multiply-adds for one patch."""
        half, quarter = channels // 2, channels // 4
        return NORM * channels + channels**2 + channels * half + half * quarter + quarter * 2
