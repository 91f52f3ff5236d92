"""The interface between methods and hosts: what a block can do (`BlockOps`) and what a method does with it (`Method`).

Axes: B images, H heads, N tokens entering a block, M tokens after it, C channels, d channels per head.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor, nn

from ..core.assignment import Assignment
from ..core.attention import ReceivedAttention
from ..core.flops import BlockShape, Cost
from ..core.schedule import Amount, ReductionSpec, make_schedule, requested_tokens
from ..errors import MctfError, did_you_mean, shown

_MOST = 3e38  # about the largest number of float32, in which kernels take options

INFORMATIVENESS = ("mean", "class", "both", "auto")


class BlockOps(Protocol):
    """The pieces of one host block: the waist between methods and hosts.

    Each piece calls the host's own modules, so LayerScale, q/k norm, drop-path and the like come along. A BlockOps
    also holds the positions of the tokens of this call where the block needs them: rotary tables, relative position
    biases. Once tokens change, the pieces of `fused(assignment, weights)` are the ones to call.
    Shapes: x and h are B N C; q, k and v are B H N d; flat values and contexts are B N (H d); sizes are B N or None.
    """

    def plain(self, x: Tensor) -> Tensor:
        """The host's block as it is."""

    def norm1(self, x: Tensor) -> Tensor:
        """The input of the attention branch."""

    def queries_keys(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """q and k with heads split."""

    def values(self, h: Tensor) -> Tensor:
        """Flat values, B N (H d)."""

    def queries_keys_values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v with heads split, from one product."""

    def first_queries(self, h: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """q of the first `count` tokens, which are protected, k and v of all."""

    def split_heads(self, flat: Tensor) -> Tensor:
        """B N (H d) -> B H N d."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sizes: Tensor | None,
        unpool: Assignment | None = None,
        received: ReceivedAttention | None = None,
    ) -> Tensor:
        """The flat context; a key of size s counts s times.

        unpool: v has one row per slot, and each key takes the value of its slot.
        received: the result of `attention_received` for the same q, k and sizes, which may save work.
        """

    def attention_received(
        self, q: Tensor, k: Tensor, *, sizes: Tensor | None, rows: str, keep: bool = False
    ) -> ReceivedAttention:
        """Attention each token receives from all tokens ("mean"), the "class" token, or the mean of "both".

        keep: whether `attend` will be called with this result.
        """

    def attend_with_received(
        self, q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, rows: str
    ) -> tuple[Tensor, Tensor]:
        """`attend` and `attention_received` in one pass: the context, and partial sums of received attention, B G N."""

    def attention_map(self, q: Tensor, k: Tensor, *, sizes: Tensor | None) -> Tensor:
        """The attention map itself, B H N N, for the few methods that need all of it."""

    def finish_context(self, context: Tensor, h: Tensor) -> Tensor:
        """What the block does to the flat context before its output projection: a norm, or a gate computed from h.

        h is the attention input of the same tokens. Most blocks do nothing here.
        """

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        """x plus the attention branch: output projection of the finished context, LayerScale, drop-path."""

    def add_mlp(self, x: Tensor) -> Tensor:
        """x plus the MLP branch with its norm, LayerScale and drop-path."""

    def fused(self, assignment: Assignment, weights: Tensor) -> "BlockOps":
        """The pieces for tokens pooled with these weights (B N): positions and biases follow the tokens.

        To be called before any other piece reads the new tokens. A plain ViT has no positions inside its blocks and
        hides a forgotten call; EVA, BEiT and DINOv3 do not.
        """


def run_unfused(block: BlockOps, x: Tensor, sizes: Tensor | None) -> Tensor:
    """A block without reduction, its attention proportional to `sizes` (B N) where they are given."""
    return block.plain(x) if sizes is None else run_pieces(block, x, sizes)


def run_pieces(block: BlockOps, x: Tensor, sizes: Tensor | None) -> Tensor:
    """`run_unfused` composed of the block's pieces: the host's own forward may assume one token per position."""
    h = block.norm1(x)
    q, k, v = block.queries_keys_values(h)
    context = block.attend(q, k, v, sizes=sizes)
    return block.add_mlp(block.add_attention(x, block.finish_context(context, h)))


def run_first(block: BlockOps, x: Tensor, sizes: Tensor | None, count: int) -> Tensor:
    """The first `count` tokens after a block that leaves them in place: B count C. The others are only attended to."""
    h = block.norm1(x)
    q, k, v = block.first_queries(h, count)
    context = block.finish_context(block.attend(q, k, v, sizes=sizes), h[:, :count])
    return block.add_mlp(block.add_attention(x[:, :count], context))


@dataclass(frozen=True)
class BlockContext:
    """Per-block context passed to `Method.run`.

    r: number of tokens to remove. protected: number of leading tokens that stay in place.
    index: the block's number, of `depth`. amount: the schedule's entry for the block, for methods that count tokens per
    image. next_reduces: whether the next block reduces too. dense: whether the user asked for every token.
    method_state: the method's own state from the block before, None at first.
    layers: the method's learned layers for this block. training: whether learned methods behave as in training.
    """

    r: int
    protected: int
    index: int = 0
    depth: int = 1
    method_state: Any = None
    layers: nn.Module | None = None
    training: bool = False
    next_reduces: bool = False
    amount: Amount = 0
    dense: bool = False


@dataclass(frozen=True)
class BlockOutput:
    """What one block returns.

    x: B M C. sizes: B M, float32, number of input tokens per token; None while all are 1. A token of size 0 is
    padding: it stands for no input token and receives no attention.
    assignment: B N -> M, None where no token was merged or dropped. weights: B N, each token's weight in its slot: 0 if
    it was dropped, above 0 if it was kept or merged. An assignment needs weights: positions and traces read them.
    informativeness: B N, where the method computes it. method_state: passed to the method in the next block.
    """

    x: Tensor
    sizes: Tensor | None
    assignment: Assignment | None = None
    weights: Tensor | None = None
    informativeness: Tensor | None = None
    method_state: Any = None

    def __post_init__(self) -> None:
        if (self.assignment is None) != (self.weights is None):
            missing = "weights" if self.weights is None else "an assignment"
            raise MctfError(
                f"a block's output lacks {missing}: give both, weight 0 for dropped tokens and above 0 for the others"
            )


class Method(ABC):
    """A token-reduction method: a frozen dataclass whose fields are its options. Only `run` is required.

    name, summary: for users and the registry. default_r: the reduction where the user gives none.
    min_tokens: tokens that always remain.
    drops: tokens are dropped, not merged, so a block may take more than half of them; bipartite matching cannot.
    learned: it has layers or a loss of its own and needs training (`extra_loss`: see `mctf.train.objective.ExtraLoss`).
    learns_from_original: its loss reads the outputs of the frozen original model.
    adaptive: each image decides how many tokens remain, so that a plan gives an upper bound (see `Adaptive`).
    restores_tokens: `restore_tokens` returns one token per input token after the last block.
    masks_in_training: in training, dropped tokens stay behind a mask; a block's r is then that of the plan.
    control: a reference to compare with (random drop, free drop), not a method to use.
    trims_last: whether `mctf.fuse` trims the last block by default, see `FusedStack`.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    default_r: ClassVar[ReductionSpec] = 16
    min_tokens: ClassVar[int] = 0
    drops: ClassVar[bool] = False
    learned: ClassVar[bool] = False
    learns_from_original: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    restores_tokens: ClassVar[bool] = False
    masks_in_training: ClassVar[bool] = False
    control: ClassVar[bool] = False
    trims_last: ClassVar[bool] = False

    def can_trim(self, *, reduces: bool) -> bool:
        """Whether `run_first` gives the protected tokens after the last block. reduces: whether that block reduces.

        By default where it does not. A method that attends with all tokens before it reduces them can trim always.
        """
        return not (reduces or self.adaptive or self.restores_tokens)

    def trims(self, schedule: Sequence[Amount], trim_last: bool | None) -> bool:
        """Whether the last block is trimmed under a schedule. trim_last: None for the method's choice."""
        wanted = self.trims_last and any(schedule) if trim_last is None else trim_last
        return wanted and self.can_trim(reduces=bool(schedule[-1]))

    def key_sizes(self, sizes: Tensor | None) -> Tensor | None:
        """The sizes that attention is proportional to; None for methods without an option `proportional`."""
        return sizes if getattr(self, "proportional", False) else None

    @abstractmethod
    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """One block on x (B N C), which removes ctx.r tokens."""

    def resolve(self, *, class_token: bool) -> Self:
        """This method for a model with or without a class token; raises MctfError where it cannot work."""
        return self

    def fit(self, shapes: Callable[[], Sequence[BlockShape]], tokens: Callable[[], int]) -> Self:
        """This method for a model with blocks of these shapes and this many tokens before the first.

        Both are worked out when they are asked for.
        """
        return self

    def make_schedule(self, r: ReductionSpec, *, depth: int, blocks: Iterable[int] | None) -> tuple[Amount, ...]:
        """One amount per block from the user's `r` and `blocks`; raises MctfError where they make no sense."""
        return make_schedule(r, depth=depth, blocks=blocks, default_blocks=self.default_blocks(depth))

    def check_schedule(self, schedule: Sequence[Amount]) -> None:  # noqa: B027 (most methods follow any schedule)
        """Raise MctfError for amounts per block that the method cannot follow."""

    def default_blocks(self, depth: int) -> Iterable[int]:
        """The blocks that reduce tokens where the user names none: all but the first."""
        return range(1, depth)

    def num_requested(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """Number of tokens to remove by the schedule, before `num_reduced` caps it.

        amount: the schedule's entry. initial: tokens entering the first block. stage: reducing blocks before this one.
        """
        return requested_tokens(amount, tokens - protected)

    def num_reduced(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """Number of tokens that a block with `tokens` tokens removes."""
        requested = self.num_requested(amount, tokens, protected=protected, initial=initial, stage=stage)
        most = tokens - max(self.min_tokens, protected + 1) if self.drops else (tokens - protected) // 2
        return max(0, min(requested, tokens - self.min_tokens, most))

    def num_remaining(self, tokens: int, r: int) -> int:
        """Tokens after a block that removes r; more where a method adds or restores tokens."""
        return tokens - r

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        """Multiply-adds of one block under both accounts."""
        run = self.run_macs(shape, tokens, r, protected=protected)
        paper = self.paper_macs(shape, tokens, r, protected=protected)
        return Cost(paper=run if paper is None else paper, run=run)

    def run_macs(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> int:
        """Multiply-adds that `run` executes, counted on the meta device; a formula that gives the same is faster."""
        from ._counting import count_macs

        return count_macs(self, shape, tokens, r, protected)

    def paper_macs(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> int | None:
        """Multiply-adds by the published formula; None where that is what runs."""
        return None

    def make_layers(self, shapes: Sequence[BlockShape], schedule: Sequence[Amount]) -> nn.ModuleDict | None:
        """Learned layers for a model with such blocks, by block number; None where the method has none."""
        return None

    def layers_of(self, ctx: BlockContext) -> nn.Module:
        """The learned layers of this block; raises MctfError where there are none."""
        if ctx.layers is None:
            raise MctfError(self.lacks_layers(ctx.index))
        return ctx.layers

    def lacks_layers(self, block: int) -> str:
        """The error for a block that was fused without reducing its tokens, and now should."""
        return (
            f"{self.name} has no layers for block {block}: unfuse the model, and fuse it with this r from the beginning"
        )

    def restore_tokens(self, x: Tensor, method_state: Any) -> Tensor | None:
        """One token per input token in place of the last block's output x; None to leave x as it is."""
        return None


class Adaptive(Method):
    """A method whose blocks decide per image how many tokens remain; r other than 0 names the blocks that decide.

    A plan gives the upper bound; `mctf.evaluation.adaptive_flops` counts what remains of real images. Batches are
    padded to the image with most tokens (`core.selection.pack_ragged`), so one image alone is never padded. Shapes
    depend on the data: torch.compile breaks its graph at every block that decides, and fullgraph=True is refused.
    """

    default_r: ClassVar[ReductionSpec] = 1
    adaptive: ClassVar[bool] = True

    def num_requested(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        return 0

    def num_reduced(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """0: no token is certain to be removed."""
        return 0

    @abstractmethod
    def cost_of(self, shape: BlockShape, tokens: int, num_remaining: int, *, protected: int) -> Cost:
        """Multiply-adds of a deciding block after which `num_remaining` of its tokens are left."""

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        if r == 0:
            return Cost(paper=shape.plain(tokens), run=shape.plain(tokens))
        return self.cost_of(shape, tokens, tokens - r, protected=protected)


def present(x: Tensor, sizes: Tensor | None) -> Tensor:
    """Which of the tokens x (B N C) are not padding: B N, bool."""
    return x.new_ones(x.shape[:2]).bool() if sizes is None else sizes > 0


def check_class_token(method: str, class_token: bool) -> None:
    """Raise MctfError for a method that needs a class token on a model without one."""
    if not class_token:
        raise MctfError(
            f"method {method!r} ranks tokens by the attention of the class token, which this model's blocks "
            "do not have: use 'mctf' or 'tome'"
        )


def check_bool(**options: object) -> None:
    """Raise MctfError unless each option is True or False; the text "no" would count as true."""
    for option, value in options.items():
        if not isinstance(value, bool):
            raise MctfError(f"{option}={shown(value)} must be True or False")


def check_choice(**options: tuple[object, Sequence[str]]) -> None:
    """Raise MctfError unless each option, given with its choices, is one of them."""
    for option, (value, choices) in options.items():
        if not isinstance(value, str) or value not in choices:
            word = value if isinstance(value, str) else shown(value)
            raise MctfError(f"{option}={shown(value)} is unknown: {did_you_mean(word, choices)}")


def resolve_informativeness(choice: str, class_token: bool) -> str:
    """The rows of attention that make a token informative: "auto" is "both" with a class token and "mean" without."""
    if choice == "auto":
        return "both" if class_token else "mean"
    if choice != "mean" and not class_token:
        raise MctfError(f"informativeness={choice!r} reads the class token, which this model does not have: use 'mean'")
    return choice


def check_number(most: float = _MOST, hint: str = "", **options: object) -> None:
    """Raise MctfError unless each option is a finite number from 0 to `most`."""
    for option, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
            limit = "0 or above" if most == _MOST else f"from 0 to {most:g}"
            raise MctfError(f"{option}={shown(value)} must be a finite number, {limit}{hint}")


def check_whole(least: int = 0, *, most: int = 2**32 - 1, optional: bool = False, **options: object) -> None:
    """Raise MctfError unless each option is a whole number from `least` to `most`, or None where it is optional."""
    for option, value in options.items():
        whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        if not whole and not (optional and value is None):
            limit = f"from {least} on" if type(value) is not int or value < least else f"from {least} to {most}"
            raise MctfError(f"{option}={shown(value)} must be a whole number {limit}" + ", or None" * optional)
