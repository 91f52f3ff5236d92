"""Dropping tokens: the same number from every image (`keep_topk`), or as many as each image decides (`pack_ragged`).

A dropped token keeps an entry in the assignment, so that the assignment stays total: it maps to the preceding kept
token, or to the first kept unprotected one where no unprotected token precedes it, with weight 0.

Axes: B images, N tokens, n of them unprotected, M kept, C channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MctfError
from .assignment import Assignment

_DEPENDS = (
    "how many tokens remain depends on the images, which torch.jit.trace and torch.vmap cannot follow: "
    "use a method that keeps equally many of every image, such as mctf"
)


@dataclass(frozen=True)
class TopK:
    """The kept tokens, the same number in every image, in their old order.

    index: B M, their indices among all N. assignment: B N -> M. weights: B N, 1 for kept tokens, 0 for dropped ones.
    """

    index: Tensor
    assignment: Assignment
    weights: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """The kept tokens, or whatever belongs to them: B N … -> B M …."""
        return _gather(x, self.index)


def keep_topk(scores: Tensor, keep: int, *, protected: int) -> TopK:
    """Keep the protected tokens and, of the others, those with the `keep` largest scores (B n)."""
    batch, tokens = scores.shape[0], protected + scores.shape[1]
    first = torch.arange(protected, device=scores.device).expand(batch, -1)
    index = torch.cat([first, protected + scores.topk(keep, dim=1).indices.sort(dim=1).values], dim=1)
    kept = torch.zeros(batch, tokens, dtype=torch.long, device=scores.device).scatter(1, index, 1) > 0
    return TopK(index, drop_assignment(kept, protected + keep, protected=protected), kept.float())


def drop_assignment(kept: Tensor, count: int, *, protected: int) -> Assignment:
    """The assignment of tokens by whether they are kept (B N, bool), `count` of them in every image."""
    position = torch.arange(kept.shape[1], device=kept.device)
    return Assignment(torch.maximum(kept.cumsum(1) - 1, position.clamp_max(protected)), count)


@dataclass(frozen=True)
class Ragged:
    """The kept tokens of a batch whose images keep different numbers, padded to M, the maximum over the batch.

    Padding has size 0: it receives no attention, and its values are never read. After the last block copies of an
    image's last token take its place (`fill_padding`).

    index: B M, the kept token in each slot, any one in padding. assignment: B N -> M. weights: B N, 1 for kept tokens,
    0 for dropped ones. present: B M, False in padding; None while no image is padded.
    """

    assignment: Assignment
    weights: Tensor
    index: Tensor
    present: Tensor | None

    @property
    def sizes(self) -> Tensor | None:
        """B M, float32: 1 for tokens, 0 for padding; None where there is no padding."""
        return None if self.present is None else self.present.float()

    def gather(self, x: Tensor) -> Tensor:
        """What belongs to the kept tokens, and zeros in padding: B N … -> B M …."""
        kept = _gather(x, self.index)
        if self.present is None:
            return kept
        return kept.masked_fill(~self.present.view(*self.index.shape, *(1,) * (x.dim() - 2)), 0)


@torch.compiler.disable(reason="how many tokens remain depends on the images: compile without fullgraph=True")
def pack_ragged(kept: Tensor, *, protected: int) -> Ragged | None:
    """Pack tokens by whether they are kept (B N, bool, at least one per image); None where all are.

    protected: that many leading tokens are always kept.
    """
    tokens = kept.shape[1]
    counts = kept.sum(dim=1)
    # set by torch.jit.trace alone: counting FLOPs traces too, and may
    if getattr(torch.jit._trace, "_trace_module_map", None) is not None:
        raise MctfError(_DEPENDS)
    try:
        fewest, most = torch.stack(counts.aminmax()).tolist() if len(counts) else (tokens, tokens)
    except RuntimeError:
        if not torch._C._functorch.is_functorch_wrapped_tensor(kept):
            raise
        raise MctfError(_DEPENDS) from None
    if fewest == tokens:
        return None
    position = torch.arange(tokens, device=kept.device)
    earliest = torch.where(position < protected, 0, (counts[:, None] - 1).clamp_max(protected))
    slots = torch.maximum(kept.cumsum(1) - 1, earliest)
    index = (~kept).int().argsort(dim=1, stable=True)[:, :most]
    present = None if fewest == most else position[:most] < counts[:, None]
    return Ragged(Assignment(slots, most), kept.float(), index, present)


def fill_padding(x: Tensor, sizes: Tensor | None) -> Tensor:
    """Tokens (B M C) with each image's last token in place of its padding.

    Duplicates are harmless for a head that takes reduced tokens as they are; zero padding is not.
    """
    if sizes is None:
        return x
    last = (sizes > 0).sum(dim=1, keepdim=True) - 1
    return _gather(x, torch.minimum(torch.arange(x.shape[1], device=x.device), last))


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B N …) by index (B M): B M …."""
    return x.gather(1, index.view(*index.shape, *(1,) * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))
