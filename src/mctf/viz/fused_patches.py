"""Pictures of one image after fusion, as in the paper's figure of fused tokens, and the images they are drawn from.

The patches of one token have their mean color and a border in the token's own color. Single patches keep their pixels.
Dropped patches are pale gray with stripes.

Axes: rows and columns of patches; H and W pixels.
"""

import colorsys
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from ..data import Preprocessing, ReadLimits
from ..data.decode import DEFAULT_LIMITS, decode_image, read_file
from ..errors import MctfError

# Steps of a two-dimensional low-discrepancy sequence (powers of the inverse plastic number): hues of neighboring
# patches lie far apart for any number of columns.
_HUE_PER_ROW = 0.7548776662466927
_HUE_PER_COLUMN = 0.5698402909980532

_SEAM = 0.72  # brightness of the thin line between two single patches
_PALE = (135, 215)  # grays of black and of white pixels of dropped patches
_STRIPE = 70  # gray of the stripes over them


def open_image(path: Path, limits: ReadLimits = DEFAULT_LIMITS) -> Image.Image:
    """An RGB image, upright and fully decoded; raises MctfError for a missing, damaged or other file."""
    if path.is_dir():
        raise MctfError(f"{path} is a folder: name the images in it")
    if not os.path.exists(path):
        raise MctfError(f"there is no image file {path}: check the name")
    return decode_image(lambda: read_file(path, limits), name=str(path), limits=limits, upright=True)


def to_image(tensor: Tensor, preprocessing: Preprocessing) -> Image.Image:
    """A model input (3 H W) as an image: the normalization is undone."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocessing.mean, preprocessing.std))
    return to_pil_image((tensor.cpu() * std + mean).clamp(0, 1))


def enlarge(image: Image.Image, scale: int) -> Image.Image:
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.LANCZOS)


def patch_grid(patches: int, *, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the square patches that cover an image; raises MctfError where there is no such grid."""
    density = math.sqrt(max(patches, 0) / (height * width))  # patches per pixel along one side
    rows, columns = round(height * density), round(width * density)
    if patches < 1 or rows * columns != patches:
        raise MctfError(f"{patches} patches form no grid of squares over a {height}x{width} image")
    return rows, columns


def group_color(row: int, column: int) -> tuple[int, int, int]:
    """The border color of a token whose first patch lies here: saturated, and unlike that of nearby tokens."""
    hue = (row * _HUE_PER_ROW + column * _HUE_PER_COLUMN) % 1
    saturation, value = ((0.95, 1.0), (0.65, 1.0), (0.9, 0.8))[(row + column) % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def fused_picture(
    image: Image.Image,
    slots: ArrayLike,
    *,
    grid: tuple[int, int],
    dropped: ArrayLike | None = None,
    scale: int = 3,
    borders: bool = True,
) -> Image.Image:
    """The image with every fused group of patches in its mean color and inside its own border.

    slots: the token of each patch, row by row: a source map without its prefix tokens.
    grid: rows and columns of patches. dropped: whether each patch is dropped, none of them by default; the slot of a
    dropped patch is ignored. scale: picture pixels per image pixel.
    borders: False for pictures of a few pixels per patch, where borders would hide the colors.

    A group's border color depends on the position of its first patch, so it stays the same from block to block while
    that patch remains the first.
    """
    groups = _Groups.of(slots, grid, dropped)
    image = image.convert("RGB")
    large = enlarge(image, scale)
    pixels = np.asarray(large)
    labels = groups.labels(large.height, large.width)
    fused = groups.fused[labels]

    side = min(large.height // grid[0], large.width // grid[1])
    picture = np.where(fused[..., None], groups.mean_colors(np.asarray(image))[labels], pixels)
    picture = np.where(groups.dropped[labels][..., None], _striped(large, side), picture)
    if not borders:
        return Image.fromarray(picture.round().astype(np.uint8))
    border = fused & _near_another(labels, max(1, side // 14))
    seam = ~fused & _near_another(labels, 1)
    picture = np.where(seam[..., None], picture * _SEAM, picture)
    picture = np.where(border[..., None], groups.colors()[labels], picture)
    return Image.fromarray(picture.round().astype(np.uint8))


@dataclass(frozen=True)
class _Groups:
    """Patches numbered by group.

    index: rows x columns, the group of each patch, 0 … groups - 1. first: the first patch of each group.
    dropped: true for the group of all dropped patches. fused: true for any other group of more than one patch.
    """

    index: NDArray[Any]
    first: NDArray[Any]
    dropped: NDArray[Any]
    fused: NDArray[Any]

    @classmethod
    def of(cls, slots: ArrayLike, grid: tuple[int, int], dropped: ArrayLike | None) -> "_Groups":
        flat = np.asarray(slots)
        is_dropped = np.zeros(flat.shape, dtype=bool) if dropped is None else np.asarray(dropped, dtype=bool)
        for values, kind in ((flat, "slot"), (is_dropped, "dropped flag")):
            if values.shape != (grid[0] * grid[1],):
                shape = values.shape
                raise MctfError(f"expected one {kind} for each of {grid[0]}x{grid[1]} patches, got shape {shape}")
        group_keys = np.where(is_dropped, flat.min() - 1, flat)
        _, first, index, counts = np.unique(group_keys, return_index=True, return_inverse=True, return_counts=True)
        return cls(index.reshape(grid), first, is_dropped[first], (counts > 1) & ~is_dropped[first])

    def labels(self, height: int, width: int) -> NDArray[Any]:
        """The group of every pixel, H W."""
        rows, columns = self.index.shape
        row = np.arange(height) * rows // height
        column = np.arange(width) * columns // width
        return self.index[row[:, None], column]

    def mean_colors(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Mean color of each group over the pixels (H W 3) of all its patches: groups x 3."""
        labels = self.labels(*pixels.shape[:2]).ravel()
        sums = [np.bincount(labels, weights=channel, minlength=len(self.first)) for channel in pixels.reshape(-1, 3).T]
        return np.stack(sums, axis=1) / np.bincount(labels, minlength=len(self.first))[:, None]

    def colors(self) -> NDArray[Any]:
        """Border color of each group: groups x 3."""
        columns = self.index.shape[1]
        return np.array([group_color(*divmod(int(patch), columns)) for patch in self.first])


def _striped(image: Image.Image, side: int) -> NDArray[Any]:
    """The image in pale gray under diagonal stripes, three per patch of `side` pixels: H W 3."""
    black, white = _PALE
    gray = black + np.asarray(image.convert("L")) * ((white - black) / 255)
    period, width = max(3, side // 3), max(1, side // 14)
    row, column = np.indices(gray.shape)
    stripes = (column - row) % period < width
    return np.repeat(np.where(stripes, _STRIPE, gray)[..., None], 3, axis=2)


def _near_another(labels: NDArray[Any], distance: int) -> NDArray[Any]:
    """Pixels within this distance of another group or the picture's edge, in any of eight directions."""
    height, width = labels.shape
    padded = np.pad(labels, distance, constant_values=-1)
    result = np.zeros(labels.shape, dtype=bool)
    for down in (0, distance, 2 * distance):
        for right in (0, distance, 2 * distance):
            result |= padded[down : down + height, right : right + width] != labels
    return result
