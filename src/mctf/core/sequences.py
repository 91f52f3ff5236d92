"""Several token sequences in one batch: padded to one length, or packed one behind the other.

Tokens of one sequence attend to that sequence alone. Sequences of equally many tokens form a group, which is a plain
batch; padding is apart from them, so that nothing can attend to it or fuse with it.

Axes: B rows of a batch, L tokens in a row, S sequences of a group, N tokens in each of them, P padding beside them,
T = B L.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MctfError

_DEPENDS = (
    "padded and packed images decide the shapes of a fused model, which a traced or exported graph cannot follow: "
    "export it on images of one size"
)
_NO_PADDING = (
    "a fused model takes no attention mask but one of padding, the same for all patches of an image: "
    "omit it, or run mctf.unfuse(model)"
)


@dataclass(frozen=True)
class SequenceGroup:
    """The sequences of one length.

    tokens: S N, their places among all T tokens. padding: S P, places of the padding in their rows; None where there
    is none. rows: S, the row of each sequence in the batch.
    """

    tokens: Tensor
    padding: Tensor | None
    rows: Tensor


@dataclass(frozen=True)
class Sequences:
    """The groups of a batch; every token is in one of them. origin: T, the place of each token in `join`'s input."""

    groups: tuple[SequenceGroup, ...]
    origin: Tensor

    def split(self, x: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Tokens and padding of each group: B L C or T C -> S N C and S P C."""
        flat = x.reshape(-1, x.shape[-1])
        return [(flat[group.tokens], None if group.padding is None else flat[group.padding]) for group in self.groups]

    def join(self, parts: Sequence[tuple[Tensor, Tensor | None]], like: Tensor) -> Tensor:
        """Undo `split`, in the shape of `like`."""
        flat = [part.flatten(0, 1) for pair in parts for part in pair if part is not None]
        return torch.cat(flat)[self.origin].view_as(like)


def padded_sequences(real: Tensor) -> Sequences:
    """The sequences of a padded batch, by whether a token is real (B L, bool)."""
    counts = read_numbers(real.sum(dim=1))
    if 0 in counts:
        raise MctfError("an image of the batch is padding alone: leave it out")
    length = real.shape[1]
    order = (~real).to(torch.uint8).argsort(dim=1, stable=True)  # real tokens first, in their old order
    order = order + torch.arange(len(counts), device=real.device)[:, None] * length
    groups = []
    for count in dict.fromkeys(counts):
        rows = torch.tensor([row for row, each in enumerate(counts) if each == count], device=real.device)
        places = order[rows]
        padding = None if count == length else places[:, count:]
        groups.append(SequenceGroup(places[:, :count], padding, rows))
    return _sequences(groups)


def packed_sequences(lengths: Sequence[int], device: torch.device) -> Sequences:
    """The sequences of tokens that are packed one behind the other, by their lengths."""
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    groups = []
    for length in dict.fromkeys(lengths):
        first = [start for start, each in zip(starts, lengths, strict=True) if each == length]
        tokens = torch.tensor(first, device=device)[:, None] + torch.arange(length, device=device)
        groups.append(SequenceGroup(tokens, None, torch.zeros(len(first), dtype=torch.long, device=device)))
    return _sequences(groups)


def real_tokens(mask: Tensor) -> Tensor:
    """Which tokens a mask of padding admits: B L, bool.

    mask: B L (1 for real), B 1 L L or B 1 1 L (True, or 0 to add, for real). What padding attends to does not matter.
    """
    _check_eager()
    if mask.dim() == 2:
        return mask.bool()
    if mask.dim() != 4:
        raise MctfError(_NO_PADDING)
    admitted = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]
    real = admitted.any(dim=1)
    same = admitted == real[:, None]
    if admitted.shape[1] > 1:
        same = same | ~real[:, :, None]
    if not bool(same.all()):
        raise MctfError(_NO_PADDING)
    return real


def block_lengths(blocks: Tensor) -> list[int] | None:
    """Lengths of the sequences between which a mask (N N, bool) admits no attention; None for any other mask."""
    _check_eager()
    starts = torch.cat([blocks.new_ones(1), ~blocks.diagonal(-1)])
    number = starts.cumsum(0)
    if not bool((blocks == (number[:, None] == number)).all()):
        return None
    return read_numbers(number.unique(return_counts=True)[1])


def read_numbers(values: Tensor) -> list[int]:
    """The numbers of a tensor, on which shapes depend; raises MctfError in a graph that would fix them."""
    _check_eager()
    return values.tolist()


def _check_eager() -> None:
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        raise MctfError(_DEPENDS)


def _sequences(groups: list[SequenceGroup]) -> Sequences:
    flat = [part.flatten() for group in groups for part in (group.tokens, group.padding) if part is not None]
    places = torch.cat(flat)
    origin = torch.empty_like(places)
    origin[places] = torch.arange(len(places), device=places.device)
    return Sequences(tuple(groups), origin)
