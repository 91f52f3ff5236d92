"""What a host is: a model of some library whose stack of blocks can be run by a method."""

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from ..core.cost import BlockShape
from ..methods.base import BlockOps
from ..stack import FusedStack


@dataclass(frozen=True)
class Architecture:
    """What the cost of a model follows from, without running it.

    tokens: entering the first block, protected ones included. stem: multiply-adds before the blocks.
    head: multiply-adds after them that do not depend on the tokens; head_per_token: those that do.
    """

    name: str
    tokens: int
    protected: int
    blocks: tuple[BlockShape, ...]
    stem: int
    head: int
    head_per_token: int
    reads_every_token: bool


class Host(Protocol):
    """A supported model. Only `install` and `uninstall` change it."""

    @property
    def container(self) -> nn.Module:
        """The module that holds the blocks."""

    def install(self, stack: FusedStack) -> None:
        """Put the fused stack in the container's place."""

    def uninstall(self, stack: FusedStack) -> None:
        """Undo `install`."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images the model was made for."""

    @property
    def depth(self) -> int: ...
    @property
    def class_token(self) -> bool:
        """Whether the first token is a class token."""

    @property
    def protected(self) -> int: ...
    @property
    def reads_every_token(self) -> bool: ...
    def ops(self, block: nn.Module) -> BlockOps: ...
    def architecture(self, image_size: tuple[int, int] | None) -> Architecture: ...
