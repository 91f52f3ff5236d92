"""The fifteen operations of RandAugment, each on a batch of images with an amount for every one.

They are those of timm's "rand-m9-mstd0.5-inc1" with the same amounts. Colour operations take and give B 3 h w, float
from 0 to 255. Motions give, as 3 3 matrices, where in the picture each pixel of the result is taken from: points are
(x, y, 1) in pixels, the corner of the picture being the origin.

Axes: B images, 3 colours, h w pixels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on the device, without waiting for the work that is queued there."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


@contextmanager
def drawing_alone(device: torch.device) -> Iterator[None]:
    """What the host computes within is computed by one thread, if the heavy work is done elsewhere.

    A few thousand numbers a batch are worth no second thread. On a machine of many cores, waking the others up and
    waiting for them took longer than the rest of a step.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Operation:
    """amount: from a level (0 to 1) and a sign (-1 or 1) to what `colour` or `motion` takes, all B.

    One of `colour` (images and amounts) and `motion` (amounts, and height and width of the picture) is there.
    """

    name: str
    amount: Callable[[Tensor, Tensor], Tensor]
    colour: Callable[[Tensor, Tensor], Tensor] | None = None
    motion: Callable[[Tensor, tuple[int, int]], Tensor] | None = None


def auto_contrast(images: Tensor, _amounts: Tensor) -> Tensor:
    """Every colour stretched over the whole range."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) * 255 / (high - low).clamp(min=1), images)


def equalize(images: Tensor, _amounts: Tensor) -> Tensor:
    """Every colour mapped so that its levels are about equally frequent, by Pillow's rule.

    Pixels below a level are counted in the sorted ones: sums by atomic additions would be slow where many pixels
    share a level.
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
    """amounts: distance of the levels that are left."""
    steps = _each(amounts)
    return (images / steps).floor() * steps


def solarize(images: Tensor, amounts: Tensor) -> Tensor:
    """amounts: the level from which on pixels are inverted."""
    return torch.where(images < _each(amounts), images, 255 - images)


def solarize_add(images: Tensor, amounts: Tensor) -> Tensor:
    """amounts: what pixels of the darker half gain."""
    return torch.where(images < 128, (images + _each(amounts)).clamp(max=255), images)


def saturation(images: Tensor, amounts: Tensor) -> Tensor:
    return _blend(grey(images), images, amounts)


def contrast(images: Tensor, amounts: Tensor) -> Tensor:
    return _blend(grey(images).mean((2, 3), keepdim=True), images, amounts)


def brightness(images: Tensor, amounts: Tensor) -> Tensor:
    return (images * _each(amounts)).clamp(0, 255)


def sharpness(images: Tensor, amounts: Tensor) -> Tensor:
    """The smooth picture weighs the middle pixel 5 and its eight neighbours 1; the border stays as it is."""
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = (9 * F.avg_pool2d(images, 3, stride=1) + 4 * images[:, :, 1:-1, 1:-1]) / 13
    return _blend(smooth, images, amounts)


def grey(images: Tensor) -> Tensor:
    """B 1 h w."""
    red, green, blue = images.split(1, dim=1)
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue


def rotate(amounts: Tensor, size: tuple[int, int]) -> Tensor:
    """amounts: degrees, against the clock, about the middle."""
    angle = -torch.deg2rad(amounts)
    cosine, sine, middle_x, middle_y = angle.cos(), angle.sin(), size[1] / 2, size[0] / 2
    return _matrices(
        (cosine, sine, middle_x - cosine * middle_x - sine * middle_y),
        (-sine, cosine, middle_y + sine * middle_x - cosine * middle_y),
    )


def shear_x(amounts: Tensor, _size: tuple[int, int]) -> Tensor:
    one, zero = torch.ones_like(amounts), torch.zeros_like(amounts)
    return _matrices((one, amounts, zero), (zero, one, zero))


def shear_y(amounts: Tensor, _size: tuple[int, int]) -> Tensor:
    one, zero = torch.ones_like(amounts), torch.zeros_like(amounts)
    return _matrices((one, zero, zero), (amounts, one, zero))


def translate_x(amounts: Tensor, size: tuple[int, int]) -> Tensor:
    """amounts: shares of the width."""
    one, zero = torch.ones_like(amounts), torch.zeros_like(amounts)
    return _matrices((one, zero, amounts * size[1]), (zero, one, zero))


def translate_y(amounts: Tensor, size: tuple[int, int]) -> Tensor:
    """amounts: shares of the height."""
    one, zero = torch.ones_like(amounts), torch.zeros_like(amounts)
    return _matrices((one, zero, zero), (zero, one, amounts * size[0]))


def _each(amounts: Tensor) -> Tensor:
    return amounts[:, None, None, None]


def _blend(base: Tensor, images: Tensor, amounts: Tensor) -> Tensor:
    """amounts: 0 gives the base, 1 the images, more goes beyond them."""
    return torch.lerp(base.expand_as(images), images, _each(amounts)).clamp(0, 255)


def _matrices(x: tuple[Tensor, ...], y: tuple[Tensor, ...]) -> Tensor:
    last = torch.tensor([0.0, 0.0, 1.0]).expand(len(x[0]), 3)
    return torch.stack([torch.stack(x, 1), torch.stack(y, 1), last], 1)


def _nothing(level: Tensor, _sign: Tensor) -> Tensor:
    return torch.zeros_like(level)


def _either_way(most: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda level, sign: sign * level * most


def _factor(level: Tensor, sign: Tensor) -> Tensor:
    return (1 + sign * level * 0.9).clamp(min=0.1)


OPERATIONS = (
    Operation("auto_contrast", _nothing, auto_contrast),
    Operation("equalize", _nothing, equalize),
    Operation("invert", _nothing, invert),
    Operation("rotate", _either_way(30), motion=rotate),
    Operation("posterize", lambda level, _: 2 ** (4 + (level * 4).floor().clamp(max=3)), posterize),
    Operation("solarize", lambda level, _: 256 - (level * 256).floor(), solarize),
    Operation("solarize_add", lambda level, _: (level * 110).floor(), solarize_add),
    Operation("saturation", _factor, saturation),
    Operation("contrast", _factor, contrast),
    Operation("brightness", _factor, brightness),
    Operation("sharpness", _factor, sharpness),
    Operation("shear_x", _either_way(0.3), motion=shear_x),
    Operation("shear_y", _either_way(0.3), motion=shear_y),
    Operation("translate_x", _either_way(0.45), motion=translate_x),
    Operation("translate_y", _either_way(0.45), motion=translate_y),
)


# MERGED from mctf.data.gpu_randaugment:
# RandAugment for a whole batch on its device: two operations an image, each applied half of the time.
#
# It shares with timm's "rand-m9-mstd0.5-inc1" the fifteen operations, how often each comes, and the amounts. It differs
# where a batch allows less work, and in nothing that a label depends on:
# - Colour operations run before the crop, on the stored pixels, of which there are fewer; so they see the contrast of
#   the whole image rather than of the crop, and sharpness acts on stored pixels.
# - Motions run after the crop on normalised pixels. Two of them are one: a pixel that the first would have moved out of
#   the picture can come back in by the second. Sampling is bilinear.
#
# Axes: B images, h w stored pixels, H W pixels of the result.

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
