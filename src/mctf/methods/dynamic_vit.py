"""DynamicViT: a predictor before a few blocks learns which patches to drop.

Rao et al., "DynamicViT: Efficient Vision Transformers with Dynamic Token Sparsification", NeurIPS 2021. Before blocks
3, 6 and 9 of twelve the predictor reads every patch and the mean of the remaining ones; of n patches at the start
int(n rho^s) remain after stage s, rho = 1 - r. Training is described in `_predictor`.

Choices where the paper is silent: registers are kept like the class token; a head that reads every token gets, for a
dropped patch, the kept one before it, in training as in inference.

Axes: B images, N tokens, n of them patches, M kept, C channels.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.attention import at_least_float32
from ..core.flops import BlockShape
from ..core.selection import keep_topk
from ._predictor import Decisions, PredictorMethod, decide, masked_mean, ones_for, run_masked
from .base import BlockContext, BlockOps, BlockOutput


@dataclass(frozen=True)
class DynamicViT(PredictorMethod):
    """r = 0.3, the default, keeps 0.7 of the patches, then 0.7^2, then 0.7^3; options as in `PredictorMethod`."""

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
        return BlockOutput(run_masked(block, x, decisions.mask()), None, method_state=decisions)

    def restore_tokens(self, x: Tensor, method_state: Any) -> Tensor | None:
        """In training, what inference returns: each dropped patch takes the kept token before it."""
        if method_state is None:
            return None
        kept, protected = method_state.mask().detach() > 0, method_state.protected
        position = torch.arange(kept.shape[1], device=kept.device)
        before = torch.where(kept, position, -1).cummax(dim=1).values
        first = protected + kept[:, protected:].int().argmax(dim=1, keepdim=True)
        source = torch.where((position >= protected) & (before < protected), first, before)
        return torch.take_along_dim(x, source[..., None], dim=1)


class Predictor(nn.Module):
    """Keep probability of each patch: half of the channels its own, half the mean over the remaining patches."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half, quarter = channels // 2, channels // 4
        self.read = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, channels), nn.GELU())
        self.score = nn.Sequential(
            nn.Linear(channels, half), nn.GELU(), nn.Linear(half, quarter), nn.GELU(), nn.Linear(quarter, 2)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Log-probabilities of keeping and dropping, B n 2, from patches B n C and the mask of remaining ones, B n."""
        own, common = self.read(x).tensor_split([x.shape[-1] // 2], dim=-1)
        both = torch.cat([own, masked_mean(common, mask).expand(-1, x.shape[1], -1)], dim=-1)
        return at_least_float32(self.score(both)).log_softmax(dim=-1)
