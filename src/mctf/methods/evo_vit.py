"""Evo-ViT: half of the patches, those with most class attention, pass through a block; the others bypass it.

Xu et al., "Evo-ViT: Slow-Fast Token Evolution for Dynamic Vision Transformer", AAAI 2022. The first third of the
blocks runs unreduced. The global class attention g starts as the class token's attention to each patch in the block
before; each later block averages it with its own attention, for the patches that pass through it. In the other blocks
the patches with the largest g and the protected tokens pass through attention and MLP, while the rest, the
placeholders, stay unchanged in place. The number of tokens between blocks does not change. (An unreduced block in
between updates g where the block after it selects.)

Patches are selected at one third and two thirds of the depth (blocks 4 and 8 of twelve), once per stage. The authors'
training first selects in every block, and by stages in its last third: see `every_block`.

Choices: placeholders stay unchanged as in the released code for DeiT, without the paper's representative token. The
model keeps its own head, usually that of the class token; the authors train and use a second one on the mean of the
patches. There are no learned layers and no further loss.

Axes: B images, N tokens, M of them in the block, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from ..core.flops import BlockShape
from ..core.schedule import Amount, ReductionSpec
from ..core.selection import TopK, keep_topk
from ..errors import MctfError
from .base import BlockContext, BlockOps, BlockOutput, Method, check_bool, check_class_token

_NOT_FIRST = "evo_vit selects by the attention of the block before: r must be 0 in block 0"


@dataclass(frozen=True)
class _Attention:
    """State between blocks. whole: B N, the global class attention. selected: tokens of the current stage."""

    whole: Tensor
    selected: TopK | None = None

    def after(self, selected: TopK, received: Tensor) -> "_Attention":
        """After a block in which the selected tokens received this class attention (B M)."""
        mixed = (self.whole.gather(1, selected.index) + received) / 2
        return _Attention(self.whole.scatter(1, selected.index, mixed), selected)


@dataclass(frozen=True)
class EvoViT(Method):
    """r is the share, or the number, of the patches that bypass a block: 0.5 by default.

    every_block: in training, select in every block; inference always selects by stages.
    """

    every_block: bool = False

    name: ClassVar[str] = "evo_vit"
    summary: ClassVar[str] = "Evo-ViT (AAAI 2022): half of the patches bypass a block, none is dropped"
    default_r: ClassVar[ReductionSpec] = 0.5

    def __post_init__(self) -> None:
        check_bool(every_block=self.every_block)

    def resolve(self, *, class_token: bool) -> Self:
        check_class_token(self.name, class_token)
        return self

    def check_schedule(self, schedule: Sequence[Amount]) -> None:
        if any(schedule[:1]):
            raise MctfError(_NOT_FIRST)

    def default_blocks(self, depth: int) -> range:
        return range(_stages(depth)[0], depth)

    def num_reduced(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """The patches that bypass the block, all but one at most."""
        requested = self.num_requested(amount, tokens, protected=protected, initial=initial, stage=stage)
        return max(0, min(requested, tokens - protected - 1))

    def num_remaining(self, tokens: int, r: int) -> int:
        return tokens

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        attention: _Attention | None = ctx.method_state
        if ctx.r == 0 and not ctx.next_reduces:
            return BlockOutput(block.plain(x), None, method_state=attention)
        if ctx.r == 0:
            x, received = _run_with_class_attention(block, x)
            whole = received if attention is None else (attention.whole + received) / 2
            return BlockOutput(x, None, informativeness=whole, method_state=_Attention(whole))
        if attention is None:
            raise MctfError(_NOT_FIRST)
        selected, keep = attention.selected, x.shape[1] - ctx.protected - ctx.r
        new_stage = ctx.index in _stages(ctx.depth) or (ctx.training and self.every_block)
        if selected is None or selected.assignment.count != ctx.protected + keep or new_stage:
            selected = keep_topk(attention.whole[:, ctx.protected :], keep, protected=ctx.protected)
        inside = block.fused(selected.assignment, selected.weights)
        updated, received = _run_with_class_attention(inside, selected.gather(x))
        x = x.scatter(1, selected.index[..., None].expand_as(updated), updated.to(x.dtype))
        state = attention.after(selected, received)
        return BlockOutput(x, None, informativeness=attention.whole, method_state=state)

    def run_macs(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> int:
        return shape.plain(tokens - r)


def _stages(depth: int) -> Sequence[int]:
    """The blocks in which patches are selected: 4 and 8 of twelve."""
    return tuple(max(1, round(depth * part / 3)) for part in (1, 2))


def _run_with_class_attention(block: BlockOps, x: Tensor) -> tuple[Tensor, Tensor]:
    """A block composed of its pieces, and the class token's attention in it: B M C and B M."""
    h = block.norm1(x)
    q, k, v = block.queries_keys_values(h)
    context, received = block.attend_with_received(q, k, v, sizes=None, rows="class")
    return block.add_mlp(block.add_attention(x, block.finish_context(context, h))), received.sum(dim=1)
