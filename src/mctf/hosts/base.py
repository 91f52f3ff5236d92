"""A host: one supported model, its stack of blocks, and the pieces of each block that a method calls.

Axes: B images, H heads, N tokens, M tokens after fusion, d channels per head.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from .. import kernels
from ..core import attention
from ..core.assignment import Assignment
from ..core.attention import ReceivedAttention
from ..core.flops import BlockShape
from ..core.sequences import SequenceGroup, Sequences
from ..errors import MctfError
from ..stack import FusedStack, StackHost


@dataclass(frozen=True)
class Architecture:
    """The shapes that determine the cost of a model, without running it.

    tokens: entering the first block, protected ones included. stem: multiply-adds before the blocks.
    head: multiply-adds after the blocks that are independent of the number of tokens; head_per_token: the others.
    second_head: multiply-adds of a second classifier per unprotected token, which published costs omit (LV-ViT).
    reads_every_token, reads_protected_only: what follows the blocks, see `StackHost`.
    """

    name: str
    tokens: int
    protected: int
    blocks: tuple[BlockShape, ...]
    stem: int
    head: int
    head_per_token: int
    reads_every_token: bool
    second_head: int = 0
    reads_protected_only: bool = False


class Host(StackHost):
    """A supported model. Only `install` and `uninstall` change it."""

    @property
    @abstractmethod
    def container(self) -> nn.Module:
        """The module that holds the blocks and nothing else; the fused stack, once it is installed."""

    @abstractmethod
    def install(self, stack: FusedStack) -> None:
        """Replace the container by the fused stack."""

    @property
    @abstractmethod
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images that the model expects."""

    @property
    @abstractmethod
    def class_token(self) -> bool:
        """Whether the first token is a class token."""

    @property
    def class_feature(self) -> bool:
        """Whether the first token after all blocks is a class token; CaiT adds one behind the fused blocks."""
        return self.class_token

    @abstractmethod
    def architecture(self, image_size: tuple[int, int] | None) -> Architecture:
        """The model's shapes for images of this size; None for its own size."""

    @property
    def depth(self) -> int:
        """Number of blocks; one that occurs twice counts twice."""
        return len(self.container._modules)

    @property
    def reads_every_token(self) -> bool:
        """True by default: a model that iterates over its blocks always gets one token per input token."""
        return True

    @property
    def reads_protected_only(self) -> bool:
        """False by default: nothing is known about the head."""
        return False

    @property
    def after_blocks(self) -> Sequence[nn.Module]:
        return ()

    @property
    def uses_positions(self) -> bool:
        return False

    def arguments(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        return refuse_arguments(*args, **kwargs)

    def has_sequences(self, arguments: Mapping[str, Any]) -> bool:
        """False by default: one sequence per image, and no padding."""
        return False

    def sequences(self, x: Tensor, arguments: Mapping[str, Any]) -> Sequences:
        raise NotImplementedError

    def call_whole(self, block: nn.Module, x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        return self.ops(block, arguments, None).plain(x)

    def sequence_arguments(self, arguments: Mapping[str, Any], group: SequenceGroup) -> Mapping[str, Any]:
        raise NotImplementedError


def refuse_arguments(*args: object, **kwargs: object) -> Mapping[str, Any]:
    """For blocks that take tokens alone: raises MctfError for any argument other than None and False."""
    if any(value is not None and value is not False for value in (*args, *kwargs.values())):
        raise MctfError("a fused model takes no attention mask or other block arguments: run mctf.unfuse(model)")
    return {}


class SoftmaxAttention:
    """The attention pieces of a `BlockOps`: softmax(q kT * scale + bias + log s). A host's class adds the others.

    An object holds the pieces of one block *for the tokens at hand*. Once a method has merged or dropped tokens, the
    old object is wrong for them wherever positions enter the block (rotary tables, relative position biases): call
    `block = block.fused(assignment, weights)` first, then `block.plain(x)` or any other piece. Blocks without
    positions return themselves, so tests on a plain ViT do not notice a missing call; tests on EVA or BEiT do.
    """

    @property
    def scale(self) -> float:
        """Factor on q kT."""
        raise NotImplementedError

    @property
    def attention_dropout(self) -> float:
        """Dropout probability of attention weights in this pass: 0 in evaluation."""
        return 0.0

    @property
    def bias(self) -> Tensor | None:
        """Added to the logits, H N N or B H N N, in blocks with relative positions; None elsewhere."""
        return None

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
        dropout, bias = self.attention_dropout, self.bias
        return kernels.attend(
            q, k, v, sizes=sizes, scale=self.scale, dropout=dropout, bias=bias, unpool=unpool, received=received
        )

    def attention_received(
        self, q: Tensor, k: Tensor, *, sizes: Tensor | None, rows: str, keep: bool = False
    ) -> ReceivedAttention:
        return kernels.attention_received(q, k, sizes=sizes, scale=self.scale, rows=rows, bias=self.bias, keep=keep)

    def attend_with_received(
        self, q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, rows: str
    ) -> tuple[Tensor, Tensor]:
        dropout, bias = self.attention_dropout, self.bias
        return kernels.attend_with_received(
            q, k, v, sizes=sizes, scale=self.scale, rows=rows, dropout=dropout, bias=bias
        )

    def first_queries(self, h: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """From the queries of all tokens; a host's class may save the others."""
        q, k, v = self.queries_keys_values(h)
        return q[:, :, :count], k, v

    def queries_keys_values(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v with heads split."""
        raise NotImplementedError

    def attention_map(self, q: Tensor, k: Tensor, *, sizes: Tensor | None) -> Tensor:
        return attention.attention_map(q, k, sizes=sizes, scale=self.scale, bias=self.bias)

    def finish_context(self, context: Tensor, h: Tensor) -> Tensor:
        """The identity, for blocks without a norm or a gate between attention and its output projection."""
        return context

    def fused(self, assignment: Assignment, weights: Tensor) -> Self:
        """The block itself, for blocks whose pieces do not depend on the positions of their tokens."""
        return self
