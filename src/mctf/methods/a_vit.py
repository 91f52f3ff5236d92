"""A-ViT: every token halts by itself, by a score from its first channel.

Yin et al., "A-ViT: Adaptive Tokens for Efficient Vision Transformer", CVPR 2022. There are no learned
layers. After block l the first channel of a token gives its halting score

    h_l = sigmoid(gamma x_l[0] - beta),    taken as 1 after the last block

and the token halts at the first block where the sum of its scores exceeds 1 - eps. Its output is a mean over the blocks
it ran through (adaptive computation time): the sum of h_l x_l before that block, and R x_l there, where the remainder
R = 1 - (sum of the earlier h_l) makes the weights sum to 1. The head reads these means. While all first channels are
far below beta / gamma, every token runs to the end with R near 1, and the model computes what the pretrained one does.

The loss beside the cross-entropy, with the authors' weights:

    5e-4 mean(blocks run + R) + 1e-3 KL(H || G)

H_l is the mean of h_l over patches and images, divided by its sum over l and clamped to 0.01 .. 0.99; G is a Gaussian
over l = 1 .. L of width 1, centered at block 8 of twelve, scaled so that the entries up to the centre sum to 0.98.

Choices where the public facts end or disagree:
- Halted tokens are removed, in training as in inference. Protected ones that halt keep their positions as padding, and
  an image whose tokens have all halted keeps its first one as a stand-in without weight.
- beta is 30 for fewer than 384 channels and 75 from there on, as published for 192 and 384.
- The published weights do not fix the cost. With `keep`, a third term, keep_weight * (share - keep) * mean(blocks run +
  R), steers towards one: share is the share of blocks that tokens ran through, without gradient, so that the ponder
  loss grows with what remains to be saved, and turns negative below the target.
- H is a mean over all input patches, 0 for halted ones, of all images (the released code leaves out the first image in
  place of the first token). After the last block it uses the score, not the 1 it is taken as: with the 1, nothing
  would be learned while all scores are near 0. In other depths G is centered at two thirds.

Axes: B images, N input tokens, M tokens present, C channels, L blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.attention import at_least_float32
from ..core.flops import BlockShape, Cost
from ..core.selection import Ragged, pack_ragged
from .base import Adaptive, BlockContext, BlockOps, BlockOutput, check_number, check_whole, run_unfused

_EPS = 0.01
_BETAS = {0: 30.0, 384: 75.0}  # from so many channels on


@dataclass(frozen=True)
class Halting:
    """The state of halting between blocks.

    output: B N C, the running means. ponder: B N, blocks run and, once halted, R.
    scores: per block the mean of h over all input patches. For the tokens present, B M each: position, the input token
    it is; running, whether it has not halted; gathered, the sum of its h; remainder, R.
    """

    output: Tensor
    ponder: Tensor
    scores: tuple[Tensor, ...]
    position: Tensor
    running: Tensor
    gathered: Tensor
    remainder: Tensor

    def packed(self, ragged: Ragged) -> "Halting":
        """The same for the kept tokens."""
        return replace(
            self,
            position=ragged.gather(self.position),
            running=ragged.gather(self.running),
            gathered=ragged.gather(self.gathered),
            remainder=ragged.gather(self.remainder),
        )


@dataclass(frozen=True)
class AViT(Adaptive):
    """r other than 0 names the blocks after which tokens may halt.

    gamma, beta: of the halting score; beta None follows the channels of the model.
    ponder_weight, prior_weight: weights of the two terms of the loss. centre: the target mean block of halting, counted
        from 1; None for two thirds of the depth.
    keep, keep_weight: the target share of blocks that tokens run through, and the weight of its term; None for the
        authors' loss alone.
    """

    gamma: float = 10.0
    beta: float | None = None
    ponder_weight: float = 5e-4
    prior_weight: float = 1e-3
    centre: int | None = None
    keep: float | None = None
    keep_weight: float = 0.1

    name: ClassVar[str] = "a_vit"
    summary: ClassVar[str] = "A-ViT (CVPR 2022), learned: tokens halt one by one, by their first channel"
    drops: ClassVar[bool] = True
    learned: ClassVar[bool] = True
    restores_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        numbers = ("gamma", "beta", "ponder_weight", "prior_weight", "keep", "keep_weight")
        optional = {"beta", "keep"}
        values = {name: getattr(self, name) for name in numbers}
        check_number(**{name: value for name, value in values.items() if value is not None or name not in optional})
        check_whole(1, optional=True, centre=self.centre)

    def default_blocks(self, depth: int) -> range:
        return range(depth)

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        x = run_unfused(block, x, sizes)
        before: Halting | None = ctx.method_state
        if before is None:
            if not ctx.amount:
                return BlockOutput(x, sizes)
            before = _initial_state(x, blocks=ctx.index)
        h = self._scores(x) if ctx.amount else torch.zeros_like(before.gathered)
        last = ctx.index == ctx.depth - 1
        after = accumulate(before, x, h, last=last, protected=ctx.protected)
        return BlockOutput(x, sizes, method_state=after) if last else _remove_halted(x, after, ctx.protected)

    def _scores(self, x: Tensor) -> Tensor:
        beta = self.beta
        if beta is None:
            beta = _BETAS[max(width for width in _BETAS if width <= x.shape[-1])]
        return (self.gamma * at_least_float32(x[..., 0]) - beta).sigmoid()

    def restore_tokens(self, x: Tensor, method_state: Any) -> Tensor | None:
        """The running means, one per input token."""
        return None if method_state is None else method_state.output.to(x.dtype)

    def extra_loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, branches: Sequence[Any], *, infer: Any = None
    ) -> Tensor:
        """The loss beside the cross-entropy; see `ExtraLoss` in `mctf.train.objective`."""
        state: Halting | None = branches[0].method_states[-1]
        if state is None:
            return branches[0].logits.new_zeros(())
        prior = prior_divergence(torch.stack(state.scores), self.centre)
        return self._ponder_weight(state) * state.ponder.mean() + self.prior_weight * prior

    def _ponder_weight(self, state: Halting) -> Tensor | float:
        if self.keep is None:
            return self.ponder_weight
        run = state.ponder.detach().ceil() - 1  # the remainder is above 0 and at most 1
        return self.ponder_weight + self.keep_weight * (run.mean() / len(state.scores) - self.keep)

    def cost_of(self, shape: BlockShape, tokens: int, num_remaining: int, *, protected: int) -> Cost:
        """That of the block: tokens halt behind it, and additions are not counted."""
        return Cost(paper=shape.plain(tokens), run=shape.plain(tokens))


def _initial_state(x: Tensor, *, blocks: int) -> Halting:
    """The state of tokens (B N C) that have run through so many blocks without halting."""
    batch, tokens, _ = x.shape
    ones = at_least_float32(x.new_ones(batch, tokens))
    return Halting(
        output=torch.zeros_like(at_least_float32(x)),
        ponder=blocks * ones,
        scores=(ones.new_zeros(()),) * blocks,
        position=torch.arange(tokens, device=x.device).expand(batch, -1),
        running=ones.bool(),
        gathered=0 * ones,
        remainder=ones,
    )


def accumulate(state: Halting, x: Tensor, h: Tensor, *, last: bool, protected: int) -> Halting:
    """The state after a block with output x (B M C) and scores h (B M)."""
    patches = state.output.shape[0] * (state.output.shape[1] - protected)
    score = (h * state.running)[:, protected:].sum() / patches
    h = (torch.ones_like(h) if last else h) * state.running
    gathered = state.gathered + h
    runs_on = state.running & (gathered <= 1 - _EPS)
    rest = state.remainder.where(state.running & ~runs_on, 0)
    share = h.where(runs_on, rest)  # of this block in the mean
    index = state.position[..., None].expand_as(x)
    return replace(
        state,
        output=state.output.scatter_add(1, index, share[..., None] * x),
        ponder=state.ponder.scatter_add(1, state.position, state.running + rest),
        scores=(*state.scores, score),
        running=runs_on,
        gathered=gathered,
        remainder=state.remainder - share,
    )


def _remove_halted(x: Tensor, state: Halting, protected: int) -> BlockOutput:
    """The tokens that run on, and protected ones in place; halted ones among these have size 0."""
    first = torch.arange(x.shape[1], device=x.device) == 0
    live = state.running | (first & ~state.running.any(dim=1, keepdim=True))  # attention needs at least one key
    kept = live.clone()
    kept[:, :protected] = True
    ragged = pack_ragged(kept, protected=protected)
    if ragged is not None:
        x, live, state = ragged.gather(x), ragged.gather(live), state.packed(ragged)
    sizes = None if bool(live.all()) else live.float()
    if ragged is None:
        return BlockOutput(x, sizes, method_state=state)
    return BlockOutput(x, sizes, ragged.assignment, ragged.weights, method_state=state)


def prior_divergence(scores: Tensor, centre: int | None) -> Tensor:
    """KL(H || G) of the mean halting scores of all blocks (L): a scalar."""
    depth = len(scores)
    centre = round(depth * 2 / 3) if centre is None else centre
    block = torch.arange(1, depth + 1, device=scores.device, dtype=scores.dtype)
    target = (-(block - centre).square() / 2).exp()
    target = target * 0.98 / target[:centre].sum()
    total = scores.sum()
    # scores may all underflow to 0: their shares are then clamped to 0.01, without a gradient of 0 / 0
    share = (scores / total.where(total > 0, 1)).clamp(0.01, 0.99)
    return (share * (share / target).log()).sum()
