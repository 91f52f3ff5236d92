"""A-ViT: every token halts when it has seen enough, told by its own first channel.

Yin et al., "A-ViT: Adaptive Tokens for Efficient Vision Transformer", CVPR 2022. There are no layers beside the
model's own. After block l the first channel of a token gives its halting score

    h_l = sigmoid(gamma x_l[0] - beta),    taken as 1 after the last block

and the token halts at the first block where the scores it has gathered exceed 1 - eps. What it leaves is a mean over
the blocks it ran through (adaptive computation time): the sum of h_l x_l before that block, and R x_l there, where the
remainder R = 1 - (sum of the h_l before) makes the weights sum to 1. The head reads these means. While all first
channels are far below beta / gamma, every token runs to the end with R near 1: a pretrained model starts as it was.

The loss that comes on top of the cross-entropy, with the authors' weights:

    5e-4 mean(blocks run + R) + 1e-3 KL(H || G)

H_l is the mean of h_l over patches and images, divided by its sum over l and clamped to 0.01 .. 0.99; G is a Gaussian
over l = 1 .. L of width 1, centred at block 8 of twelve, scaled so that the entries up to the centre sum to 0.98.

Choices where the public facts end or disagree:
- Halted tokens really leave, in training as in inference. Protected ones that halt keep their places, as padding, and
  an image whose tokens have all halted keeps its first one as a stand-in that no longer counts.
- beta is 30 for fewer than 384 channels and 75 from there on, as published for 192 and 384.
- Their weights leave open how much is saved. With `keep` a third term, keep_weight * (share - keep) * mean(blocks run +
  R), steers towards a cost: share is that of the blocks which tokens ran through, a number without gradient, so that
  the ponder loss counts for more the more there is to save, and against itself where too much was.
- H is a mean over all patches that entered, 0 where one has halted, of all images (the released code leaves out the
  first image where it means the first token). After the last block it has the score and not the 1 it is taken as:
  with that, nothing would be learned while all scores are near 0. In other depths G is centred at two thirds.

Axes: B images, N tokens that entered, M tokens present, C channels, L blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.flops import BlockShape, Cost
from ..core.matching import at_least_float32
from ..core.selection import Ragged, pack_ragged
from ..errors import MctfError
from .base import Adaptive, BlockContext, BlockOps, BlockOutput, run_unfused

_EPS = 0.01
_BETAS = {0: 30.0, 384: 75.0}  # from so many channels on


@dataclass(frozen=True)
class Halting:
    """What was gathered so far.

    output: B N C, the means as far as they have come. ponder: B N, blocks run and, once halted, R.
    scores: for each block the mean of h over all patches that entered. Of the tokens present, B M each: place, which of
    those that entered it is; running, whether it has not halted; gathered, the sum of its h; remainder, R.
    """

    output: Tensor
    ponder: Tensor
    scores: tuple[Tensor, ...]
    place: Tensor
    running: Tensor
    gathered: Tensor
    remainder: Tensor

    def packed(self, packing: Ragged) -> "Halting":
        """The same for the tokens that stay."""
        return replace(
            self,
            place=packing.gather(self.place),
            running=packing.gather(self.running),
            gathered=packing.gather(self.gathered),
            remainder=packing.gather(self.remainder),
        )


@dataclass(frozen=True)
class AViT(Adaptive):
    """r other than 0 lets tokens halt after a block; how many do is theirs to decide.

    gamma, beta: of the halting score; beta None goes by the channels of the model.
    ponder_weight, prior_weight: of the two terms of the loss. centre: the block, counted from 1, at which tokens are
        to halt in the mean; None for two thirds of the depth.
    keep, keep_weight: the share of blocks that tokens are to run through in the mean, and how much that counts; None
        for the authors' loss alone.
    """

    gamma: float = 10.0
    beta: float | None = None
    ponder_weight: float = 5e-4
    prior_weight: float = 1e-3
    centre: int | None = None
    keep: float | None = None
    keep_weight: float = 0.1

    name: ClassVar[str] = "a_vit"
    summary: ClassVar[str] = "A-ViT (CVPR 2022), learned: tokens halt one by one, told by their first channel"

    def __post_init__(self) -> None:
        for option in ("gamma", "beta", "ponder_weight", "prior_weight", "keep", "keep_weight"):
            value = getattr(self, option)
            if value is None and option in ("beta", "keep"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise MctfError(f"{option}={value!r} must be a finite number, 0 or above")
        whole = isinstance(self.centre, int) and not isinstance(self.centre, bool) and self.centre >= 1
        if self.centre is not None and not whole:
            raise MctfError(f"centre={self.centre!r} must be the number of a block, counted from 1")

    def default_blocks(self, depth: int) -> range:
        return range(depth)

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        x = run_unfused(block, x, sizes)
        before: Halting | None = ctx.method_state
        if before is None:
            if not ctx.amount:
                return BlockOutput(x, sizes)
            before = _nothing_gathered(x, blocks=ctx.index)
        h = self._scores(x) if ctx.amount else torch.zeros_like(before.gathered)
        last = ctx.index == ctx.depth - 1
        after = gather(before, x, h, last=last, protected=ctx.protected)
        return BlockOutput(x, sizes, method_state=after) if last else _leave(x, after, ctx.protected)

    def _scores(self, x: Tensor) -> Tensor:
        beta = self.beta
        if beta is None:
            beta = _BETAS[max(width for width in _BETAS if width <= x.shape[-1])]
        return (self.gamma * at_least_float32(x[..., 0]) - beta).sigmoid()

    def restore_tokens(self, x: Tensor, method_state: Any) -> Tensor | None:
        """The means, one per token that entered."""
        return None if method_state is None else method_state.output.to(x.dtype)

    def extra_loss(self, model: nn.Module, images: Tensor, labels: Tensor, branches: Sequence[Any]) -> Tensor:
        """The loss beside the cross-entropy; see `ExtraLoss` in `mctf.train.objective`."""
        state: Halting | None = branches[0].carries[-1]
        if state is None:
            return branches[0].logits.new_zeros(())
        prior = prior_divergence(torch.stack(state.scores), self.centre)
        return self._ponder_weight(state) * state.ponder.mean() + self.prior_weight * prior

    def _ponder_weight(self, state: Halting) -> Tensor | float:
        if self.keep is None:
            return self.ponder_weight
        run = state.ponder.detach().ceil() - 1  # the remainder is above 0 and at most 1
        return self.ponder_weight + self.keep_weight * (run.mean() / len(state.scores) - self.keep)

    def cost_of(self, shape: BlockShape, tokens: int, remaining: int, *, protected: int) -> Cost:
        """That of the block: tokens halt behind it, and sums are not counted."""
        return Cost(paper=shape.plain(tokens), run=shape.plain(tokens))


def _nothing_gathered(x: Tensor, *, blocks: int) -> Halting:
    """Tokens (B N C) that have run through so many blocks and could not halt there."""
    batch, tokens, _ = x.shape
    ones = at_least_float32(x.new_ones(batch, tokens))
    return Halting(
        output=torch.zeros_like(at_least_float32(x)),
        ponder=blocks * ones,
        scores=(ones.new_zeros(()),) * blocks,
        place=torch.arange(tokens, device=x.device).expand(batch, -1),
        running=ones.bool(),
        gathered=0 * ones,
        remainder=ones,
    )


def gather(state: Halting, x: Tensor, h: Tensor, *, last: bool, protected: int) -> Halting:
    """What is gathered after a block that gave x (B M C) with the scores h (B M)."""
    entered = state.output.shape[0] * (state.output.shape[1] - protected)
    score = (h * state.running)[:, protected:].sum() / entered
    h = (torch.ones_like(h) if last else h) * state.running
    gathered = state.gathered + h
    runs_on = state.running & (gathered <= 1 - _EPS)
    rest = state.remainder.where(state.running & ~runs_on, 0)
    share = h.where(runs_on, rest)  # of this block in the mean
    index = state.place[..., None].expand_as(x)
    return replace(
        state,
        output=state.output.scatter_add(1, index, share[..., None] * x),
        ponder=state.ponder.scatter_add(1, state.place, state.running + rest),
        scores=(*state.scores, score),
        running=runs_on,
        gathered=gathered,
        remainder=state.remainder - share,
    )


def _leave(x: Tensor, state: Halting, protected: int) -> BlockOutput:
    """The tokens that run on, protected ones in their places."""
    first = torch.arange(x.shape[1], device=x.device) == 0
    seen = state.running | (first & ~state.running.any(dim=1, keepdim=True))  # attention needs something to see
    stays = seen.clone()
    stays[:, :protected] = True
    packing = pack_ragged(stays, protected=protected)
    if packing is None:
        return BlockOutput(x, _sizes(seen), method_state=state)
    sizes = _sizes(packing.gather(seen))
    return BlockOutput(
        packing.gather(x), sizes, packing.assignment, packing.weights, method_state=state.packed(packing)
    )


def _sizes(seen: Tensor) -> Tensor | None:
    return None if bool(seen.all()) else seen.float()


def prior_divergence(scores: Tensor, centre: int | None) -> Tensor:
    """KL(H || G) of the mean halting scores of all blocks (L): a scalar."""
    depth = len(scores)
    centre = round(depth * 2 / 3) if centre is None else centre
    block = torch.arange(1, depth + 1, device=scores.device, dtype=scores.dtype)
    wanted = (-(block - centre).square() / 2).exp()
    wanted = wanted * 0.98 / wanted[:centre].sum()
    found = (scores / scores.sum()).clamp(0.01, 0.99)
    return (found * (found / wanted).log()).sum()
