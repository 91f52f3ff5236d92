"""What a host is: a model of some library whose stack of blocks can be run by a method."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from .. import kernels
from ..core import attention
from ..core.assignment import Assignment
from ..core.attention import ReceivedAttention
from ..core.flops import BlockShape
from ..errors import MctfError
from ..stack import FusedStack, StackHost


@dataclass(frozen=True)
class Architecture:
    """What the cost of a model follows from, without running it.

    tokens: entering the first block, protected ones included. stem: multiply-adds before the blocks.
    head: multiply-adds after them that do not depend on the tokens; head_per_token: those that do.
    second_head: those of a second classifier for each unprotected token, which published costs leave out (LV-ViT).
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


class Host(StackHost):
    """A supported model. Only `install` and `uninstall` change it."""

    @property
    @abstractmethod
    def container(self) -> nn.Module:
        """The module that holds the blocks and nothing else: the fused stack, once it is installed."""

    @abstractmethod
    def install(self, stack: FusedStack) -> None:
        """Put the fused stack in the container's position."""

    @property
    @abstractmethod
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images the model was made for."""

    @property
    @abstractmethod
    def class_token(self) -> bool:
        """Whether the first token is a class token."""

    @abstractmethod
    def architecture(self, image_size: tuple[int, int] | None) -> Architecture:
        """What the cost follows from, for images of this size or of the model's own."""

    @property
    def depth(self) -> int:
        """How many blocks there are."""
        return len(list(self.container.children()))

    @property
    def reads_every_token(self) -> bool:
        """Models that iterate over their blocks get one token per input token whatever their head reads."""
        return True

    @property
    def uses_positions(self) -> bool:
        return False

    def arguments(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        return refuse_arguments(*args, **kwargs)


def refuse_arguments(*args: object, **kwargs: object) -> Mapping[str, Any]:
    """For blocks that take nothing but tokens: raises MctfError for any argument that means something."""
    if any(value is not None and value is not False for value in (*args, *kwargs.values())):
        raise MctfError("a fused model takes no attention mask or other block arguments: run mctf.unfuse(model)")
    return {}


# MERGED from mctf.hosts.base:
# The attention most blocks share: softmax(q kT * scale + bias + log s), by the fast operations where no bias is.
#
# Axes: B images, H heads, N tokens, d channels a head.


class SoftmaxAttention:
    """The attention pieces of a BlockOps; a host adds the rest."""

    @property
    def scale(self) -> float:
        raise NotImplementedError

    @property
    def attention_dropout(self) -> float:
        """Probability of dropping an attention weight in this pass: 0 in evaluation."""
        return 0.0

    @property
    def bias(self) -> Tensor | None:
        """Added to the logits, H N N or B H N N, where a block has relative positions."""
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

    def attention_map(self, q: Tensor, k: Tensor, *, sizes: Tensor | None) -> Tensor:
        return attention.attention_map(q, k, sizes=sizes, scale=self.scale, bias=self.bias)

    def finish_context(self, context: Tensor, h: Tensor) -> Tensor:
        """Blocks without a norm or a gate behind their attention do nothing."""
        return context

    def fused(self, assignment: Assignment, weights: Tensor) -> Self:
        """Blocks that do not ask where their tokens are stay as they are."""
        return self
