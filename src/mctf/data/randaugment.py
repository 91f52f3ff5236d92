"""RandAugment for a whole batch on its device: two operations an image, each applied half of the time.

It shares with timm's "rand-m9-mstd0.5-inc1" the fifteen operations, how often each comes, and the amounts. It differs
where a batch allows less work, and in nothing that a label depends on:
- Colour operations run before the crop, on the stored pixels, of which there are fewer; so they see the contrast of
  the whole image rather than of the crop, and sharpness acts on stored pixels.
- Motions run after the crop on normalised pixels. Two of them are one: a pixel that the first would have moved out of
  the picture can come back in by the second. Sampling is bilinear.

Axes: B images, h w stored pixels, H W pixels of the result.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .moving import send
from .operations import OPERATIONS, Operation

_ROUNDS = 2
_CHANCE = 0.5
_LEVEL, _LEVEL_SPREAD = 0.9, 0.05  # of 1: magnitude 9 and its deviation 0.5, out of 10


@dataclass(frozen=True)
class Round:
    """One operation for every image. rows: images in the order of their operations. amounts: theirs, so ordered.

    counts: images of each operation, and last of those that are left alone.
    """

    rows: Tensor
    amounts: Tensor
    counts: tuple[int, ...]

    def groups(self) -> Iterator[tuple[Operation, Tensor, Tensor]]:
        """Every operation that there is work for, with its rows and their amounts."""
        pieces = zip(self.rows.split(self.counts), self.amounts.split(self.counts), strict=True)
        for operation, (rows, amounts) in zip(OPERATIONS, pieces, strict=False):
            if len(rows):
                yield operation, rows, amounts

    def to(self, device: torch.device) -> "Round":
        return Round(send(self.rows, device), send(self.amounts, device), self.counts)


def draw_rounds(count: int, generator: torch.Generator) -> tuple[Round, ...]:
    """What happens to `count` images, on the CPU."""
    return tuple(_draw_round(count, generator) for _ in range(_ROUNDS))


def _draw_round(count: int, generator: torch.Generator) -> Round:
    chosen = torch.randint(len(OPERATIONS), (count,), generator=generator)
    applied = torch.rand(count, generator=generator) < _CHANCE
    level = (torch.randn(count, generator=generator) * _LEVEL_SPREAD + _LEVEL).clamp(0, 1)
    sign = torch.randint(2, (count,), generator=generator) * 2.0 - 1
    chosen = torch.where(applied, chosen, len(OPERATIONS))
    rows = chosen.argsort(stable=True)
    counts = tuple(chosen.bincount(minlength=len(OPERATIONS) + 1).tolist())
    pieces = zip(level[rows].split(counts), sign[rows].split(counts), strict=True)
    amounts = [op.amount(*piece) for op, piece in zip(OPERATIONS, pieces, strict=False)]
    return Round(rows, torch.cat([*amounts, torch.zeros(counts[-1])]), counts)


def recolour(images: Tensor, rounds: tuple[Round, ...]) -> Tensor:
    """The colour operations, in place: B 3 h w, float from 0 to 255."""
    for each in rounds:
        for operation, rows, amounts in each.groups():
            if operation.colour is not None:
                images.index_copy_(0, rows, operation.colour(images[rows], amounts))
    return images


def motions(rounds: tuple[Round, ...], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Which images of `size` are moved, and by what: rows K and matrices K 3 3, on the CPU like the rounds."""
    total = torch.eye(3).repeat(sum(rounds[0].counts), 1, 1)
    moved = torch.zeros(len(total), dtype=torch.bool)
    for each in rounds:
        for operation, rows, amounts in each.groups():
            if operation.motion is not None:
                total[rows] = total[rows] @ operation.motion(amounts, size)
                moved[rows] = True
    rows = moved.nonzero().squeeze(1)
    return rows, total[rows]


def move(images: Tensor, matrices: Tensor) -> Tensor:
    """Images (K 3 H W, normalised) seen through matrices (K 3 3); what lies outside them is 0, the mean colour."""
    height, width = images.shape[2:]
    x = torch.arange(width, device=images.device) + 0.5
    y = torch.arange(height, device=images.device)[:, None] + 0.5
    across, down = matrices[:, :2, :, None, None].unbind(1)  # K 3 1 1 each
    from_x = across[:, 0] * x + across[:, 1] * y + across[:, 2]  # K H W
    from_y = down[:, 0] * x + down[:, 1] * y + down[:, 2]
    grid = torch.stack([from_x * (2 / width) - 1, from_y * (2 / height) - 1], 3)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
