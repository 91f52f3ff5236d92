"""Random rectangles in pictures of one size, many at a time: what crops keep and what erasing takes away.

Axes: B rectangles; a rectangle is top, left, height and width in whole pixels, float32.
"""

import math

import torch
from torch import Tensor

_TRIES = 10  # as timm and torchvision try
CROP_RATIO = (3 / 4, 4 / 3)


def draw_boxes(
    count: int,
    size: tuple[int, int],
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """B 4 and B, bool: the rectangles, and which of them fit into a picture of `size` in one of ten tries.

    scale: share of the picture's area, drawn evenly. ratio: width to height, drawn evenly in its logarithm.
    """
    height, width = size
    area = _uniform((count, _TRIES), scale, generator) * height * width
    shape = _uniform((count, _TRIES), (math.log(ratio[0]), math.log(ratio[1])), generator).exp()
    tall, wide = ((area / shape).sqrt().round().clamp(min=1), (area * shape).sqrt().round().clamp(min=1))
    fits = (tall <= height) & (wide <= width)
    first = fits.int().argmax(1, keepdim=True)
    tall, wide = tall.gather(1, first).squeeze(1), wide.gather(1, first).squeeze(1)
    top, left = (torch.rand(count, generator=generator) * (room + 1) for room in (height - tall, width - wide))
    return torch.stack([top.floor(), left.floor(), tall, wide], 1), fits.any(1)


def draw_crops(count: int, size: tuple[int, int], *, scale: tuple[float, float], generator: torch.Generator) -> Tensor:
    """B 4. Where no try fits, the crop is the middle, as large as its ratio allows."""
    boxes, fits = draw_boxes(count, size, scale=scale, ratio=CROP_RATIO, generator=generator)
    height, width = size
    wide, tall = min(width, round(height * CROP_RATIO[1])), min(height, round(width / CROP_RATIO[0]))
    middle = torch.tensor([(height - tall) // 2, (width - wide) // 2, tall, wide], dtype=torch.float32)
    return torch.where(fits[:, None], boxes, middle)


def covering_size(size: tuple[int, int], wanted: tuple[int, int]) -> tuple[int, int]:
    """Height and width that a picture of `size` gets from the preprocessing of evaluation before its crop.

    It covers `wanted` without being larger than it must. torchvision rounds down, and timm, where `wanted` is
    oblong, to the nearest.
    """
    shrink = min(size[0] / wanted[0], size[1] / wanted[1])
    to_whole = math.floor if wanted[0] == wanted[1] else round
    height, width = (max(least, to_whole(side / shrink)) for side, least in zip(size, wanted, strict=True))
    return height, width


def inside(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """B H W, bool: the pixels of each rectangle in a picture of `size`."""
    top, left, tall, wide = boxes[:, :, None].unbind(1)  # B 1 each
    y, x = torch.arange(size[0], device=boxes.device), torch.arange(size[1], device=boxes.device)
    rows, columns = (y >= top) & (y < top + tall), (x >= left) & (x < left + wide)
    return rows[:, :, None] & columns[:, None]


def _uniform(shape: tuple[int, ...], bounds: tuple[float, float], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator) * (bounds[1] - bounds[0]) + bounds[0]
