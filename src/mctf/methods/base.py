"""What a method is: it runs one block its own way and says which tokens became one."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from ..core.assignment import Assignment
from ..core.cost import BlockShape, Cost
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
        self, q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, spread: Assignment | None = None
    ) -> Tensor:
        """The flat context; a key of size s counts s times. With `spread`, v has one row a slot."""

    def informativeness(self, q: Tensor, k: Tensor, *, sizes: Tensor | None, rows: str) -> Tensor:
        """Attention each token receives, B N: from all tokens ("mean"), the "class" token, or "both"."""

    def attend_and_look(
        self, q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, rows: str
    ) -> tuple[Tensor, Tensor]:
        """`attend` and `informativeness` of the same attention."""

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
class Step:
    """What one block did to the tokens.

    x: B M C. sizes: B M, float32, how many input tokens each token stands for; None while all are 1.
    assignment: B N -> M, None when nothing was fused; weights: B N, how much each token counted in its slot.
    informativeness: B N, where the method knows it.
    """

    x: Tensor
    sizes: Tensor | None
    assignment: Assignment | None = None
    weights: Tensor | None = None
    informativeness: Tensor | None = None


def check_switches(**switches: object) -> None:
    """Raise MctfError unless each of these options is True or False: "no" would mean yes."""
    for option, value in switches.items():
        if not isinstance(value, bool):
            raise MctfError(f"{option}={value!r} must be True or False")


class Method(Protocol):
    """A way to reduce tokens. Implementations are frozen dataclasses whose fields are the method's options."""

    name: ClassVar[str]
    summary: ClassVar[str]
    min_tokens: ClassVar[int]

    def suited(self, *, class_token: bool) -> "Method":
        """This method for a model with or without a class token; raises MctfError where it cannot work."""

    def default_blocks(self, depth: int) -> Iterable[int]:
        """The blocks that fuse when the user names none."""

    def run(self, block: BlockOps, x: Tensor, sizes: Tensor | None, *, r: int, protected: int) -> Step:
        """One block on x (B N C), after which r tokens fewer remain."""

    def cost(self, shape: BlockShape, tokens: int, r: int, *, protected: int) -> Cost:
        """Multiply-adds of `run`."""
