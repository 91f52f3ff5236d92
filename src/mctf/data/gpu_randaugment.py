"""RandAugment for a whole batch on its device: two operations per image, each applied with probability 0.5.

The fifteen operations, their probabilities and their amounts are those of timm's "rand-m9-mstd0.5-inc1". Two things
differ, since a batch allows less work that way:
- Color operations run before the crop, on the stored pixels, of which there are fewer. They see the contrast of the
  whole image, and sharpness acts on stored pixels.
- Geometric operations run after the crop, on normalized pixels, with bilinear sampling. Two of them are composed: a
  pixel that the first moves out of the image can be moved back by the second.

Color operations map B 3 h w to the same, float from 0 to 255. Geometric operations give 3 3 matrices from points of
the result to points of the source; points are (x, y, 1) in pixels from the top left corner.

Axes: B images, 3 channels, h w stored pixels, H W pixels of the result.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .resources import to_device

_NUM_ROUNDS = 2
_PROBABILITY = 0.5
_LEVEL, _LEVEL_STD = 0.9, 0.05  # of 1: magnitude 9 and its standard deviation 0.5, out of 10
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Operation:
    """amount: from level (0 to 1) and sign (-1 or 1) to the argument of the operation, all B.

    Either `color` (of images and amounts) or `geometry` (of amounts, and height and width) is given.
    """

    name: str
    amount: Callable[[Tensor, Tensor], Tensor]
    color: Callable[[Tensor, Tensor], Tensor] | None = None
    geometry: Callable[[Tensor, tuple[int, int]], Tensor] | None = None


def auto_contrast(images: Tensor, _amounts: Tensor) -> Tensor:
    """Every channel stretched over the whole range."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) * 255 / (high - low).clamp(min=1), images)


def equalize(images: Tensor, _amounts: Tensor) -> Tensor:
    """Histogram equalization per channel, by Pillow's rule.

    Counts come from a search in the sorted pixels: a histogram by atomic additions is slow where many pixels are equal.
    """
    levels = images.floor().flatten(2)  # B 3 P
    bins = torch.arange(256, device=images.device, dtype=images.dtype).expand(*levels.shape[:2], 256).contiguous()
    below = torch.searchsorted(levels.sort(2).values, bins)  # B 3 256
    highest = levels.amax(2, keepdim=True).long()
    step = below.gather(2, highest) // 255  # B 3 1
    table = torch.where(step > 0, ((below + step // 2) // step.clamp(min=1)).clamp(max=255), bins.long())
    return table.gather(2, levels.long()).view(images.shape).to(images.dtype)


def invert(images: Tensor, _amounts: Tensor) -> Tensor:
    return 255 - images


def posterize(images: Tensor, amounts: Tensor) -> Tensor:
    """amounts: step between the remaining levels."""
    steps = _per_image(amounts)
    return (images / steps).floor() * steps


def solarize(images: Tensor, amounts: Tensor) -> Tensor:
    """amounts: the threshold from which pixels are inverted."""
    return torch.where(images < _per_image(amounts), images, 255 - images)


def solarize_add(images: Tensor, amounts: Tensor) -> Tensor:
    """amounts: added to pixels below 128."""
    return torch.where(images < 128, (images + _per_image(amounts)).clamp(max=255), images)


def saturation(images: Tensor, amounts: Tensor) -> Tensor:
    return _blend(gray(images), images, amounts)


def contrast(images: Tensor, amounts: Tensor) -> Tensor:
    return _blend(gray(images).mean((2, 3), keepdim=True), images, amounts)


def brightness(images: Tensor, amounts: Tensor) -> Tensor:
    return (images * _per_image(amounts)).clamp(0, 255)


def sharpness(images: Tensor, amounts: Tensor) -> Tensor:
    """The smoothing kernel has 5 in the center and 1 elsewhere; border pixels are not smoothed."""
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = (9 * F.avg_pool2d(images, 3, stride=1) + 4 * images[:, :, 1:-1, 1:-1]) / 13
    return _blend(smooth, images, amounts)


def gray(images: Tensor) -> Tensor:
    """B 1 h w."""
    red, green, blue = images.split(1, dim=1)
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue


def rotate(amounts: Tensor, size: tuple[int, int]) -> Tensor:
    """amounts: degrees, counterclockwise, about the center."""
    angle = -torch.deg2rad(amounts)
    cosine, sine, center_x, center_y = angle.cos(), angle.sin(), size[1] / 2, size[0] / 2
    return _matrices(
        (cosine, sine, center_x - cosine * center_x - sine * center_y),
        (-sine, cosine, center_y + sine * center_x - cosine * center_y),
    )


def shear_x(amounts: Tensor, _size: tuple[int, int]) -> Tensor:
    one, zero = torch.ones_like(amounts), torch.zeros_like(amounts)
    return _matrices((one, amounts, zero), (zero, one, zero))


def shear_y(amounts: Tensor, _size: tuple[int, int]) -> Tensor:
    one, zero = torch.ones_like(amounts), torch.zeros_like(amounts)
    return _matrices((one, zero, zero), (amounts, one, zero))


def translate_x(amounts: Tensor, size: tuple[int, int]) -> Tensor:
    """amounts: fractions of the width."""
    one, zero = torch.ones_like(amounts), torch.zeros_like(amounts)
    return _matrices((one, zero, amounts * size[1]), (zero, one, zero))


def translate_y(amounts: Tensor, size: tuple[int, int]) -> Tensor:
    """amounts: fractions of the height."""
    one, zero = torch.ones_like(amounts), torch.zeros_like(amounts)
    return _matrices((one, zero, zero), (zero, one, amounts * size[0]))


def _per_image(amounts: Tensor) -> Tensor:
    return amounts[:, None, None, None]


def _blend(base: Tensor, images: Tensor, amounts: Tensor) -> Tensor:
    """amounts: 0 gives the base, 1 the images, larger ones extrapolate."""
    return torch.lerp(base.expand_as(images), images, _per_image(amounts)).clamp(0, 255)


def _matrices(x: tuple[Tensor, ...], y: tuple[Tensor, ...]) -> Tensor:
    last = torch.tensor([0.0, 0.0, 1.0]).expand(len(x[0]), 3)
    return torch.stack([torch.stack(x, 1), torch.stack(y, 1), last], 1)


def _no_amount(level: Tensor, _sign: Tensor) -> Tensor:
    return torch.zeros_like(level)


def _signed(largest: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda level, sign: sign * level * largest


def _factor(level: Tensor, sign: Tensor) -> Tensor:
    return (1 + sign * level * 0.9).clamp(min=0.1)


OPERATIONS = (
    Operation("auto_contrast", _no_amount, auto_contrast),
    Operation("equalize", _no_amount, equalize),
    Operation("invert", _no_amount, invert),
    Operation("rotate", _signed(30), geometry=rotate),
    Operation("posterize", lambda level, _: (16 << (level * 4).long().clamp(max=3)).float(), posterize),
    Operation("solarize", lambda level, _: 256 - (level * 256).floor(), solarize),
    Operation("solarize_add", lambda level, _: (level * 110).floor(), solarize_add),
    Operation("saturation", _factor, saturation),
    Operation("contrast", _factor, contrast),
    Operation("brightness", _factor, brightness),
    Operation("sharpness", _factor, sharpness),
    Operation("shear_x", _signed(0.3), geometry=shear_x),
    Operation("shear_y", _signed(0.3), geometry=shear_y),
    Operation("translate_x", _signed(0.45), geometry=translate_x),
    Operation("translate_y", _signed(0.45), geometry=translate_y),
)


@dataclass(frozen=True)
class Round:
    """One operation per image. rows: images sorted by operation. amounts: in the order of rows.

    counts: images per operation, and last of those without one.
    """

    rows: Tensor
    amounts: Tensor
    counts: tuple[int, ...]

    def groups(self) -> Iterator[tuple[Operation, Tensor, Tensor]]:
        """Every operation with images, its rows and their amounts."""
        pieces = zip(self.rows.split(self.counts), self.amounts.split(self.counts), strict=True)
        for operation, (rows, amounts) in zip(OPERATIONS, pieces, strict=False):
            if len(rows):
                yield operation, rows, amounts

    def to(self, device: torch.device) -> "Round":
        return Round(to_device(self.rows, device), to_device(self.amounts, device), self.counts)


def draw_rounds(count: int, generator: torch.Generator) -> tuple[Round, ...]:
    """The operations of `count` images, on the CPU."""
    return tuple(_draw_round(count, generator) for _ in range(_NUM_ROUNDS))


def _draw_round(count: int, generator: torch.Generator) -> Round:
    operations = torch.randint(len(OPERATIONS), (count,), generator=generator)
    applied = torch.rand(count, generator=generator) < _PROBABILITY
    level = (torch.randn(count, generator=generator) * _LEVEL_STD + _LEVEL).clamp(0, 1)
    sign = torch.randint(2, (count,), generator=generator) * 2.0 - 1
    operations = torch.where(applied, operations, len(OPERATIONS))
    rows = operations.argsort(stable=True)
    counts = tuple(operations.bincount(minlength=len(OPERATIONS) + 1).tolist())
    parts = zip(level[rows].split(counts), sign[rows].split(counts), strict=True)
    amounts = [operation.amount(*part) for operation, part in zip(OPERATIONS, parts, strict=False)]
    return Round(rows, torch.cat([*amounts, torch.zeros(counts[-1])]), counts)


def recolor(images: Tensor, rounds: tuple[Round, ...]) -> Tensor:
    """The color operations, in place: B 3 h w, float from 0 to 255."""
    for each in rounds:
        for operation, rows, amounts in each.groups():
            if operation.color is not None:
                images.index_copy_(0, rows, operation.color(images[rows], amounts))
    return images


def warp_matrices(rounds: tuple[Round, ...], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Images of `size` with geometric operations, and their product: rows K and matrices K 3 3, on the CPU."""
    total = torch.eye(3).repeat(sum(rounds[0].counts), 1, 1)
    warped = torch.zeros(len(total), dtype=torch.bool)
    for each in rounds:
        for operation, rows, amounts in each.groups():
            if operation.geometry is not None:
                total[rows] = total[rows] @ operation.geometry(amounts, size)
                warped[rows] = True
    rows = warped.nonzero().squeeze(1)
    return rows, total[rows]


def warp(images: Tensor, matrices: Tensor) -> Tensor:
    """Images (K 3 H W, normalized) sampled at the points of matrices (K 3 3); outside them is 0, the mean color."""
    height, width = images.shape[2:]
    x = torch.arange(width, device=images.device) + 0.5
    y = torch.arange(height, device=images.device)[:, None] + 0.5
    across, down = matrices[:, :2, :, None, None].unbind(1)  # K 3 1 1 each
    source_x = across[:, 0] * x + across[:, 1] * y + across[:, 2]  # K H W
    source_y = down[:, 0] * x + down[:, 1] * y + down[:, 2]
    grid = torch.stack([source_x * (2 / width) - 1, source_y * (2 / height) - 1], 3)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
