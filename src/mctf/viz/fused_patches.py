"""Images from files, and what a model sees of them as people see it."""

import colorsys
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from ..data import Preprocessing
from ..errors import MctfError


def open_image(path: Path) -> Image.Image:
    """An RGB image, upright, wholly decoded; raises MctfError for what is missing, damaged or no image."""
    if path.is_dir():
        raise MctfError(f"{path} is a folder: name the images in it")
    if not path.is_file():
        raise MctfError(f"there is no image file {path}")
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as failure:  # decoders of damaged files raise whatever they trip over
        reason = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
        raise MctfError(f"{path} cannot be read as an image: {reason}") from None


def seen_image(tensor: Tensor, preprocessing: Preprocessing) -> Image.Image:
    """The crop that became this input of the model (3 H W), in its own colours again."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocessing.mean, preprocessing.std))
    return to_pil_image((tensor.cpu() * std + mean).clamp(0, 1))


# MERGED from mctf.viz.fused_patches:
# A picture of one image after fusion: patches that became one token share a colour and a border.
#
# As in the paper's figure of fused tokens: the patches of one token carry their mean colour, and a border in the
# token's own colour runs wherever another token begins. Patches still alone keep their pixels. Patches that were dropped
# are pale grey with stripes.
#
# Axes: rows and columns of patches; H and W pixels.

# Steps of a two-dimensional low-discrepancy sequence (powers of the inverse plastic number): hues of neighbouring
# patches lie far apart whatever the number of columns.
_HUE_A_ROW = 0.7548776662466927
_HUE_A_COLUMN = 0.5698402909980532

_SEAM = 0.72  # how much light a thin line between two unfused patches leaves
_PALE = (135, 215)  # greys of black and of white pixels that were dropped
_STRIPE = 70  # grey of the stripes over them


def patch_grid(patches: int, *, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the square patches that cover an image; raises MctfError where none do."""
    density = math.sqrt(max(patches, 0) / (height * width))  # patches a pixel along one side
    rows, columns = round(height * density), round(width * density)
    if patches < 1 or rows * columns != patches:
        raise MctfError(f"{patches} patches form no grid of squares over a {height}x{width} image")
    return rows, columns


def group_colour(row: int, column: int) -> tuple[int, int, int]:
    """The colour of a fused token whose first patch lies here; strong, and unlike that of nearby groups."""
    hue = (row * _HUE_A_ROW + column * _HUE_A_COLUMN) % 1
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
) -> Image.Image:
    """The image with every fused group of patches in its mean colour and inside its own border.

    slots: the token of each patch, row by row: a source map without its prefix tokens.
    grid: rows and columns of patches. dropped: whether each patch was dropped, none of them by default; its slot then
    means nothing. scale: pixels of the picture a pixel of the image.

    A group's colour follows from the place of its first patch, so it stays the same from block to block for as
    long as that patch leads the group.
    """
    groups = _Groups.of(slots, grid, dropped)
    image = image.convert("RGB")
    large = image.resize((image.width * scale, image.height * scale), Image.Resampling.LANCZOS)
    pixels = np.asarray(large)
    labels = groups.labels(large.height, large.width)
    fused = groups.fused[labels]

    side = min(large.height // grid[0], large.width // grid[1])
    picture = np.where(fused[..., None], groups.mean_colours(np.asarray(image))[labels], pixels)
    picture = np.where(groups.dropped[labels][..., None], _striped(large, side), picture)
    border = fused & _near_another(labels, max(1, side // 14))
    seam = ~fused & _near_another(labels, 1)
    picture = np.where(seam[..., None], picture * _SEAM, picture)
    picture = np.where(border[..., None], groups.colours()[labels], picture)
    return Image.fromarray(picture.round().astype(np.uint8))


@dataclass(frozen=True)
class _Groups:
    """Patches numbered by group.

    index: rows x columns, the group of each patch, 0 … groups - 1. first: the first patch of each group.
    dropped: whether a group is that of all dropped patches. fused: whether another has more than one patch.
    """

    index: NDArray[Any]
    first: NDArray[Any]
    dropped: NDArray[Any]
    fused: NDArray[Any]

    @classmethod
    def of(cls, slots: ArrayLike, grid: tuple[int, int], dropped: ArrayLike | None) -> "_Groups":
        flat = np.asarray(slots)
        gone = np.zeros(flat.shape, dtype=bool) if dropped is None else np.asarray(dropped, dtype=bool)
        for values, kind in ((flat, "slot"), (gone, "mark of dropping")):
            if values.shape != (grid[0] * grid[1],):
                shape = values.shape
                raise MctfError(f"expected one {kind} for each of {grid[0]}x{grid[1]} patches, got shape {shape}")
        alike = np.where(gone, flat.min() - 1, flat)
        _, first, index, counts = np.unique(alike, return_index=True, return_inverse=True, return_counts=True)
        return cls(index.reshape(grid), first, gone[first], (counts > 1) & ~gone[first])

    def labels(self, height: int, width: int) -> NDArray[Any]:
        """The group of every pixel, H W."""
        rows, columns = self.index.shape
        row = np.arange(height) * rows // height
        column = np.arange(width) * columns // width
        return self.index[row[:, None], column]

    def mean_colours(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Mean colour of each group over the pixels (H W 3) of all its patches: groups x 3."""
        labels = self.labels(*pixels.shape[:2]).ravel()
        sums = [np.bincount(labels, weights=channel, minlength=len(self.first)) for channel in pixels.reshape(-1, 3).T]
        return np.stack(sums, axis=1) / np.bincount(labels, minlength=len(self.first))[:, None]

    def colours(self) -> NDArray[Any]:
        """Border colour of each group: groups x 3."""
        columns = self.index.shape[1]
        return np.array([group_colour(*divmod(int(patch), columns)) for patch in self.first])


def _striped(image: Image.Image, side: int) -> NDArray[Any]:
    """The image in pale grey under falling stripes, three to a patch of so many pixels: H W 3."""
    black, white = _PALE
    grey = black + np.asarray(image.convert("L")) * ((white - black) / 255)
    period, width = max(3, side // 3), max(1, side // 14)
    row, column = np.indices(grey.shape)
    stripes = (column - row) % period < width
    return np.repeat(np.where(stripes, _STRIPE, grey)[..., None], 3, axis=2)


def _near_another(labels: NDArray[Any], distance: int) -> NDArray[Any]:
    """Pixels with one of another group, or the picture's edge, within this distance in any of eight directions."""
    height, width = labels.shape
    padded = np.pad(labels, distance, constant_values=-1)
    result = np.zeros(labels.shape, dtype=bool)
    for down in (0, distance, 2 * distance):
        for right in (0, distance, 2 * distance):
            result |= padded[down : down + height, right : right + width] != labels
    return result
