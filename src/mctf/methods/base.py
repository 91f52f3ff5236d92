"""What a method is: it runs one block its own way and says which tokens became one."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor, nn

from ..core.assignment import Assignment
from ..core.attention import ReceivedAttention
from ..core.flops import BlockShape, Cost
from ..core.schedule import Amount, ReductionSpec, capped_reduction, requested_tokens
from ..errors import MctfError


class BlockOps(Protocol):
    """What a host's block can do, piece by piece: the waist between methods and hosts.

    Each piece calls the host's own modules, so LayerScale, q/k norm, drop-path and the like come along. A BlockOps
    also knows where the tokens of this call are, if the block cares: rotary tables, relative position biases.
    Shapes: x and h are B N C; q, k and v are B H N d; flat values and contexts are B N (H d); sizes are B N or None.
    """

    def plain(self, x: Tensor) -> Tensor:
        """The host's block as it is."""

    def norm1(self, x: Tensor) -> Tensor:
        """What attention reads."""

    def queries_keys(self, h: Tensor) -> tuple[Tensor, Tensor]: ...
    def values(self, h: Tensor) -> Tensor:
        """Flat values, B N (H d)."""

    def queries_keys_values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All three with heads split, from one product."""

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
        """The flat context; a key of size s counts s times. With `unpool`, v has one row per slot.

        received: what `attention_received` returned for the same q, k and sizes, which may save work.
        """

    def attention_received(
        self, q: Tensor, k: Tensor, *, sizes: Tensor | None, rows: str, keep: bool = False
    ) -> ReceivedAttention:
        """Attention each token receives from all tokens ("mean"), the "class" token, or "both".

        keep: whether `attend` will be called with this result.
        """

    def attend_with_received(
        self, q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, rows: str
    ) -> tuple[Tensor, Tensor]:
        """`attend`, and what `attention_received` calls received, B G N."""

    def attention_map(self, q: Tensor, k: Tensor, *, sizes: Tensor | None) -> Tensor:
        """The attention itself, B H N N, for the few methods that cannot do without."""

    def finish_context(self, context: Tensor, h: Tensor) -> Tensor:
        """What the block does to the flat context before its output projection: a norm, or a gate from h.

        h is what attention read for these tokens. Most blocks do nothing here.
        """

    def add_attention(self, x: Tensor, context: Tensor) -> Tensor:
        """x plus the attention branch: output projection of the finished context, LayerScale, drop-path."""

    def add_mlp(self, x: Tensor) -> Tensor:
        """x plus the MLP branch with its norm, LayerScale and drop-path."""

    def fused(self, assignment: Assignment, weights: Tensor) -> "BlockOps":
        """The same block for tokens fused by these pooling weights (B N): positions follow the tokens."""


def run_unfused(block: BlockOps, x: Tensor, sizes: Tensor | None) -> Tensor:
    """A block on the tokens as they are, its attention proportional to `sizes` (B N) where they are given."""
    return block.plain(x) if sizes is None else run_pieces(block, x, sizes)


def run_pieces(block: BlockOps, x: Tensor, sizes: Tensor | None) -> Tensor:
    """`run_unfused` by the pieces of the block: a block itself may take its tokens for places."""
    h = block.norm1(x)
    q, k, v = block.queries_keys_values(h)
    context = block.attend(q, k, v, sizes=sizes)
    return block.add_mlp(block.add_attention(x, block.finish_context(context, h)))


@dataclass(frozen=True)
class BlockContext:
    """What a method knows beside the tokens when a block's turn comes.

    index: of the block, of `depth`. r: tokens that are to leave. protected: leading tokens that stay in place.
    method_state: what the method handed on from the block before, None at first. layers: its own layers for this block, if
    it has learned any. training: whether learned methods are to behave as in training. next_reduces: whether tokens
    are to leave the block after this one too. amount: what the schedule says of the block, for methods that count the
    tokens of each image by itself.
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


@dataclass(frozen=True)
class BlockOutput:
    """What one block did to the tokens.

    x: B M C. sizes: B M, float32, how many input tokens each token stands for; None while all are 1. A token of size 0
    is padding: it stands for nothing and nobody attends to it.
    assignment: B N -> M, None when nothing was fused; weights: B N, how much each token counted in its slot: 0 for
    one that was dropped, above 0 for one that was fused.
    informativeness: B N, where the method knows it. method_state: handed to the method in the next block.
    """

    x: Tensor
    sizes: Tensor | None
    assignment: Assignment | None = None
    weights: Tensor | None = None
    informativeness: Tensor | None = None
    method_state: Any = None


def check_class_token(method: str, class_token: bool) -> None:
    """Raise MctfError for a method that needs a class token where there is none."""
    if not class_token:
        raise MctfError(
            f"method {method!r} ranks tokens by the attention of the class token, which this model's blocks "
            "have not: use 'mctf' or 'tome'"
        )


def check_bool(**switches: object) -> None:
    """Raise MctfError unless each of these options is True or False: "no" would mean yes."""
    for option, value in switches.items():
        if not isinstance(value, bool):
            raise MctfError(f"{option}={value!r} must be True or False")


class Method(ABC):
    """A way to reduce tokens. Implementations are frozen dataclasses whose fields are the method's options.

    min_tokens: how many always remain. default_r: what leaves a block when the user does not say.
    adaptive: whether each image decides for itself how many tokens remain, so that a plan cannot know.
    masks_in_training: whether tokens that leave stay behind a mask while training, so that a block's r is that of the
    plan and does not follow from the tokens that are there.

    A method that is learned may have a method `extra_loss`, see `ExtraLoss` in `mctf.train.objective`, and
    `learns_from_original`: whether that loss asks what the model said before training.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    min_tokens: ClassVar[int] = 0
    default_r: ClassVar[ReductionSpec] = 16
    adaptive: ClassVar[bool] = False
    masks_in_training: ClassVar[bool] = False
    learns_from_original: ClassVar[bool] = False

    def resolve(self, *, class_token: bool) -> Self:
        """This method for a model with or without a class token; raises MctfError where it cannot work."""
        return self

    @abstractmethod
    def default_blocks(self, depth: int) -> Iterable[int]:
        """The blocks that fuse when the user names none."""

    @abstractmethod
    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, ctx: BlockContext) -> BlockOutput:
        """One block on x (B N C), after which ctx.r tokens fewer remain."""

    @abstractmethod
    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        """Multiply-adds of `run`."""

    def num_requested(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """How many tokens are to leave by what the user wrote, before `leaving` caps it where too few would remain."""
        return requested_tokens(amount, tokens - protected)

    def num_reduced(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """How many of `tokens` leave a block whose schedule says `amount`.

        initial: tokens entering the first block. stage: how many blocks before this one reduce.
        """
        return capped_reduction(amount, tokens, protected=protected, min_tokens=self.min_tokens)

    def num_remaining(self, tokens: int, r: int) -> int:
        """Tokens after a block that r leave; more where they come back."""
        return tokens - r

    def make_layers(self, shapes: Sequence[BlockShape], schedule: Sequence[Amount]) -> nn.ModuleDict | None:
        """Layers of its own for a model with such blocks, by block number; None where nothing is learned."""
        return None

    def layers_of(self, ctx: BlockContext) -> nn.Module:
        """Its own layers for this block; raises MctfError where there are none."""
        if ctx.layers is None:
            raise MctfError(
                f"{self.name} has no layers for block {ctx.index}: unfuse the model, and fuse it with this r from the "
                "beginning"
            )
        return ctx.layers

    def restore_tokens(self, x: Tensor, method_state: Any) -> Tensor | None:
        """Tokens to leave the last block in the place of x, one per input token; None to leave x as it is."""
        return None


# MERGED from mctf.methods.base:
# Methods under which each image decides for itself how many tokens remain.
#
# A plan cannot know what images will decide, so it gives the most that can remain; `analysis.measured` counts what
# remains of real images. Batches are padded to the fullest image (`core.packing`), so a batch is as fast as its fullest
# image, and one image alone is never padded. The shapes depend on the data: `torch.compile` breaks its graph at every
# block that decides, and fullgraph=True is refused.


class Adaptive(Method):
    """A method whose blocks decide, image by image, how many tokens go on; r says at which blocks, by not being 0."""

    default_r: ClassVar[ReductionSpec] = 1
    adaptive: ClassVar[bool] = True

    def num_requested(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        return 0

    def num_reduced(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int:
        """None, as none is bound to leave."""
        return 0

    @abstractmethod
    def cost_of(self, shape: BlockShape, tokens: int, remaining: int, *, protected: int) -> Cost:
        """Multiply-adds of a block that decides, of whose tokens these remain."""

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        if r == 0:
            return Cost(paper=shape.plain(tokens), run=shape.plain(tokens))
        return self.cost_of(shape, tokens, tokens - r, protected=protected)


def present(x: Tensor, sizes: Tensor | None) -> Tensor:
    """Which of the tokens x (B N C) are there and no padding: B N, bool."""
    return x.new_ones(x.shape[:2]).bool() if sizes is None else sizes > 0
