"""Talking heads: attention whose map is mixed across heads before and after the softmax.

    A = after(softmax(before(q kT * scale) + log s))

`before` and `after` are affine maps of the H heads of one pair of tokens. A token of size s stands for s equal keys.
Each of these would have the weight softmax / s and go through `after` by itself, so together they weigh

    s * after(softmax(before(q kT * scale) + log s) / s)

which is the sum of their columns, constant term included. Rows of A need not sum to 1, nor be positive.

Axes: B images, H heads, N tokens, d channels a head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .assignment import Assignment
from .attention import pieces_of, received
from .criteria import at_least_float32

Mix = Callable[[Tensor], Tensor]  # … H -> … H


@dataclass(frozen=True)
class TalkingHeads:
    """One block's way to mix its heads. dropped: its dropout of attention weights."""

    before: Mix
    after: Mix
    dropped: Callable[[Tensor], Tensor]
    scale: float

    def map(self, q: Tensor, k: Tensor, *, sizes: Tensor | None) -> Tensor:
        """The attention map, B H N N, as it multiplies the values; in the dtype of q, as in the host."""
        pairs = ((q * self.scale) @ k.transpose(-2, -1)).permute(0, 2, 3, 1)  # B N N H
        logits = self.before(pairs)
        if sizes is None:
            return self.after(logits.softmax(dim=2)).permute(0, 3, 1, 2)
        counts = sizes[:, None, :, None]
        shares = (logits + counts.log().to(logits.dtype)).softmax(dim=2)
        counts = counts.to(shares.dtype)
        return (self.after(shares / counts.clamp_min(1)) * counts).permute(0, 3, 1, 2)  # padding counts 0 times

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, spread: Assignment | None = None
    ) -> Tensor:
        """The map times the values, heads joined, some images at a time: B N (H d)."""
        if spread is not None:
            v = spread.spread(v.transpose(1, 2)).transpose(1, 2)
        contexts = [
            self._context(self.map(q[part], k[part], sizes=_of(sizes, part)), v[part]) for part in pieces_of(q, k)
        ]
        return torch.cat(contexts)

    @torch.no_grad()
    def informativeness(self, q: Tensor, k: Tensor, *, sizes: Tensor | None, rows: str) -> Tensor:
        """Attention each token receives, B N; where heads weigh it below 0, not even that."""
        if rows == "class":
            q = q[:, :, :1]
        looks = [_look(self.map(q[part], k[part], sizes=_of(sizes, part)), rows) for part in pieces_of(q, k)]
        return torch.cat(looks)

    def attend_and_look(
        self, q: Tensor, k: Tensor, v: Tensor, *, sizes: Tensor | None, rows: str
    ) -> tuple[Tensor, Tensor]:
        """`attend` and `informativeness` of the same map."""
        contexts, looks = [], []
        for part in pieces_of(q, k):
            full_map = self.map(q[part], k[part], sizes=_of(sizes, part))
            contexts.append(self._context(full_map, v[part]))
            looks.append(_look(full_map.detach(), rows))
        return torch.cat(contexts), torch.cat(looks)

    def _context(self, full_map: Tensor, v: Tensor) -> Tensor:
        return (self.dropped(full_map).to(v.dtype) @ v).transpose(1, 2).flatten(2)


def _look(full_map: Tensor, rows: str) -> Tensor:
    return received(at_least_float32(full_map), rows).clamp_min(0)


def _of(sizes: Tensor | None, part: slice) -> Tensor | None:
    return None if sizes is None else sizes[part]
