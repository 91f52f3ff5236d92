"""What a fused stack knows of those around it: the model it serves, and whoever watches."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from ..core.places import Places
from ..methods.base import BlockOps, Step

if TYPE_CHECKING:
    from .fused import FusedStack


class StackHost(Protocol):
    """What the stack asks of the model around it, anew in each forward pass: users change heads."""

    @property
    @abstractmethod
    def protected(self) -> int:
        """How many leading tokens (class, distillation, registers) must survive in place."""

    @property
    @abstractmethod
    def reads_every_token(self) -> bool:
        """Whether what follows the stack needs one token per input token."""

    @property
    @abstractmethod
    def carries_places(self) -> bool:
        """Whether the blocks ask where their tokens are: rotary tables, relative position biases."""

    @abstractmethod
    def arguments(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """What a block is called with beside the tokens; raises MctfError for what fused tokens cannot follow."""

    @abstractmethod
    def ops(self, block: nn.Module, arguments: Mapping[str, Any], places: Places | None) -> BlockOps:
        """The pieces of a block for one call; places is None while nothing was fused."""

    @abstractmethod
    def uninstall(self, stack: "FusedStack") -> None:
        """Take the stack out of the model again."""


class Watcher(Protocol):
    """Somebody who is told what every block does."""

    def record(self, index: int, x: Tensor, step: Step) -> None:
        """Block `index` was given x. Called in the thread of the pass, which need not be the watcher's."""
