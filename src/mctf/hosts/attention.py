"""The attention most blocks share: softmax(q kT * scale + bias + log s), by the fast operations where no bias is.

Axes: B images, H heads, N tokens, d channels a head.
"""

from typing import Any, Self

from torch import Tensor

from .. import kernels
from ..core import attention
from ..core.assignment import Assignment
from ..core.attention import Look


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
        spread: Assignment | None = None,
        look: Look | None = None,
    ) -> Tensor:
        known: dict[str, Any] = {
            "sizes": sizes,
            "scale": self.scale,
            "dropout": self.attention_dropout,
            "spread": spread,
            "look": look,
        }
        if self.bias is None:
            return kernels.attend(q, k, v, **known)
        return attention.attend(q, k, v, **known, bias=self.bias)

    def look_at(self, q: Tensor, k: Tensor, *, sizes: Tensor | None, rows: str, keep: bool = False) -> Look:
        known: dict[str, Any] = {"sizes": sizes, "scale": self.scale, "rows": rows, "keep": keep}
        if self.bias is None:
            return kernels.look_at(q, k, **known)
        return attention.look_at(q, k, **known, bias=self.bias)

    def attend_and_look(
        self, q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, rows: str
    ) -> tuple[Tensor, Tensor]:
        known: dict[str, Any] = {"sizes": sizes, "scale": self.scale, "rows": rows, "dropout": self.attention_dropout}
        if self.bias is None:
            return kernels.attend_and_look(q, k, v, **known)
        context, received = attention.attend_and_look(q, k, v, **known, bias=self.bias)
        return context, received[:, None]

    def attention_map(self, q: Tensor, k: Tensor, *, sizes: Tensor | None) -> Tensor:
        return attention.attention_map(q, k, sizes=sizes, scale=self.scale, bias=self.bias)

    def finish_context(self, context: Tensor, h: Tensor) -> Tensor:
        """Blocks without a norm or a gate behind their attention do nothing."""
        return context

    def fused(self, assignment: Assignment, weights: Tensor) -> Self:
        """Blocks that do not ask where their tokens are stay as they are."""
        return self
