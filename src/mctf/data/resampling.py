"""Crops, flips and resizing of a whole batch as two matrix products, each image with a crop of its own.

The numbers are those of Pillow's `crop` and `resize`: the same kernels, which widen where pixels get fewer, so
that nothing aliases; only its rounding to whole levels after each direction is left out.

Axes: B images, h w pixels of the stored image, H W pixels of the result.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def crop_and_resize(
    images: Tensor, boxes: Tensor, flips: Tensor, *, size: tuple[int, int], interpolation: str
) -> Tensor:
    """B C H W from B C h w, both float.

    boxes: B 4, top, left, height and width in pixels. flips: B, bool, which results are mirrored left to right.
    """
    top, left, height, width = boxes.unbind(1)
    kernel = KERNELS[interpolation]
    rows = _weights(top, height, pixels=images.shape[2], wanted=size[0], kernel=kernel)  # B H h
    columns = _weights(left, width, pixels=images.shape[3], wanted=size[1], kernel=kernel)  # B W w
    columns = torch.where(flips[:, None, None], columns.flip(1), columns)
    narrow = images.flatten(1, 2) @ columns.mT  # B Ch W, one product an image for all colours
    return rows[:, None] @ narrow.unflatten(1, images.shape[1:3])


def _weights(start: Tensor, length: Tensor, *, pixels: int, wanted: int, kernel: Callable[[Tensor], Tensor]) -> Tensor:
    """What each of `pixels` stored pixels gives to each of `wanted` ones, along one axis: B wanted pixels.

    start, length: B, the part that the wanted pixels cover; nothing outside it is looked at.
    """
    scale = (length / wanted)[:, None, None]
    stored = torch.arange(pixels, device=start.device) + 0.5
    centres = start[:, None, None] + (torch.arange(wanted, device=start.device)[:, None] + 0.5) * scale  # B wanted 1
    weights = kernel((stored - centres).abs() / scale.clamp(min=1))
    end = (start + length)[:, None, None]
    weights = torch.where((stored > start[:, None, None]) & (stored < end), weights, 0)
    return weights / weights.sum(2, keepdim=True)


def _linear(distance: Tensor) -> Tensor:
    return (1 - distance).clamp(min=0)


def _cubic(distance: Tensor) -> Tensor:
    """Keys' kernel with a = -1/2, which Pillow uses; torch's own without antialiasing has a = -3/4."""
    near = (1.5 * distance - 2.5) * distance.square() + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0))


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {"bilinear": _linear, "bicubic": _cubic}
