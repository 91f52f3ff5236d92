"""Augmentation of whole batches on their device, with timm's distributions for every image.

All random numbers are drawn on the CPU and copied, so that every device computes with the same ones. Colors change
before resizing, where there are fewer pixels. Crops, flips and resizing are two matrix products per image, with the
kernels of Pillow's `crop` and `resize`: they widen when they shrink an image, so nothing aliases. Pillow's rounding to
integers after each direction is the only difference.

Axes: B images, 3 channels, h w stored pixels, H W pixels of the result. A box is top, left, height and width in whole
pixels, float32.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .feed_options import FeedOptions
from .gpu_randaugment import brightness, contrast, draw_rounds, recolor, saturation, warp, warp_matrices
from .resources import single_threaded, to_device
from .transforms import ERASE_PROBABILITY

CROP_RATIO = (3 / 4, 4 / 3)
_CROP_TRIES = 10  # as in timm and torchvision
_ERASE_SCALE, _ERASE_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)


class BatchAugmentation:
    """From stored images to inputs of the model, as `options` have it."""

    def __init__(self, options: FeedOptions, device: torch.device) -> None:
        self.options = options
        self.device = device
        self.mean = torch.tensor(options.mean, device=device)[:, None, None] * 255
        self.std = torch.tensor(options.std, device=device)[:, None, None] * 255

    def __call__(self, stored: Tensor, generator: torch.Generator) -> Tensor:
        """B 3 H W, float32 and normalized, from B 3 h w, uint8. generator: on the CPU."""
        # autocast would posterize every image
        with torch.autocast(self.device.type, enabled=False), single_threaded(self.device):
            return self._augment(stored.float(), generator)

    def _augment(self, images: Tensor, generator: torch.Generator) -> Tensor:
        options = self.options
        rounds = draw_rounds(len(images), generator) if options.augmentation == "strong" else ()
        if rounds:
            images = recolor(images, tuple(each.to(self.device) for each in rounds))
        if options.augmentation == "none":
            images = self._center_crop(images)
        else:
            images = self._random_crop(self._jitter(images, generator), generator)
        # bicubic kernels overshoot black and white
        images = images.clamp_(0, 255).sub_(self.mean).div_(self.std)
        if rounds:
            rows, matrices = (to_device(part, self.device) for part in warp_matrices(rounds, options.image_size))
            images.index_copy_(0, rows, warp(images[rows], matrices))
            self._erase(images, generator)
        return images

    def _jitter(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Brightness, contrast and saturation in this order; torchvision shuffles the three."""
        largest = self.options.color_jitter
        if not largest:
            return images
        factors = 1 + (torch.rand(3, len(images), generator=generator) * 2 - 1) * largest
        for change, amounts in zip((brightness, contrast, saturation), to_device(factors, self.device), strict=True):
            images = change(images, amounts)
        return images

    def _random_crop(self, images: Tensor, generator: torch.Generator) -> Tensor:
        size = (images.shape[2], images.shape[3])
        boxes = draw_crops(len(images), size, scale=self.options.crop_scale, generator=generator)
        flips = torch.rand(len(images), generator=generator) < 0.5
        return self._resize(images, boxes, flips, size=self.options.image_size)

    def _center_crop(self, images: Tensor) -> Tensor:
        """As evaluation does it: the whole image is resized before it is cropped."""
        (height, width), count = self.options.image_size, len(images)
        whole = torch.tensor([0.0, 0.0, *images.shape[2:]]).expand(count, 4)
        size = covering_size((images.shape[2], images.shape[3]), (height, width))
        resized = self._resize(images, whole, torch.zeros(count, dtype=torch.bool), size=size)
        top, left = round((size[0] - height) / 2), round((size[1] - width) / 2)
        return resized[:, :, top : top + height, left : left + width].contiguous()

    def _resize(self, images: Tensor, boxes: Tensor, flips: Tensor, *, size: tuple[int, int]) -> Tensor:
        boxes, flips = to_device(boxes, self.device), to_device(flips, self.device)
        return crop_and_resize(images, boxes, flips, size=size, interpolation=self.options.interpolation)

    def _erase(self, images: Tensor, generator: torch.Generator) -> None:
        """Random erasing, in place: noise in one box of some images.

        All images of a batch share one image of noise: drawing it for each would take longer than everything else.
        """
        count, size = len(images), self.options.image_size
        boxes, fits = draw_boxes(count, size, scale=_ERASE_SCALE, ratio=_ERASE_RATIO, generator=generator)
        erased = (fits & (torch.rand(count, generator=generator) < ERASE_PROBABILITY)).nonzero().squeeze(1)
        noise = to_device(torch.randn(3, *size, generator=generator), self.device)
        rows, boxes = to_device(erased, self.device), to_device(boxes[erased], self.device)
        images.index_copy_(0, rows, torch.where(box_mask(boxes, size)[:, None], noise, images[rows]))


def draw_boxes(
    count: int,
    size: tuple[int, int],
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Random boxes (B 4), and which of them fit into an image of `size` in one of ten tries (B, bool).

    scale: fraction of the image's area, uniform. ratio: width / height, log-uniform.
    """
    height, width = size
    area = _uniform((count, _CROP_TRIES), scale, generator) * height * width
    aspect = _uniform((count, _CROP_TRIES), (math.log(ratio[0]), math.log(ratio[1])), generator).exp()
    tall, wide = ((area / aspect).sqrt().round().clamp(min=1), (area * aspect).sqrt().round().clamp(min=1))
    fits = (tall <= height) & (wide <= width)
    first = fits.int().argmax(1, keepdim=True)
    tall, wide = tall.gather(1, first).squeeze(1), wide.gather(1, first).squeeze(1)
    top, left = (torch.rand(count, generator=generator) * (room + 1) for room in (height - tall, width - wide))
    return torch.stack([top.floor(), left.floor(), tall, wide], 1), fits.any(1)


def draw_crops(count: int, size: tuple[int, int], *, scale: tuple[float, float], generator: torch.Generator) -> Tensor:
    """B 4. Where no try fits, the crop is in the center, as large as its aspect ratio allows."""
    boxes, fits = draw_boxes(count, size, scale=scale, ratio=CROP_RATIO, generator=generator)
    height, width = size
    wide, tall = min(width, round(height * CROP_RATIO[1])), min(height, round(width / CROP_RATIO[0]))
    center = torch.tensor([(height - tall) // 2, (width - wide) // 2, tall, wide], dtype=torch.float32)
    return torch.where(fits[:, None], boxes, center)


def covering_size(size: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """Height and width to which evaluation resizes an image of `size` before its center crop of `target`.

    It is the smallest size that covers `target`. torchvision rounds down; timm, for a non-square target, to the
    nearest integer.
    """
    shrink = min(size[0] / target[0], size[1] / target[1])
    to_integer = math.floor if target[0] == target[1] else round
    height, width = (max(least, to_integer(side / shrink)) for side, least in zip(size, target, strict=True))
    return height, width


def box_mask(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """B H W, bool: the pixels of each box in an image of `size`."""
    top, left, tall, wide = boxes[:, :, None].unbind(1)  # B 1 each
    y, x = torch.arange(size[0], device=boxes.device), torch.arange(size[1], device=boxes.device)
    rows, columns = (y >= top) & (y < top + tall), (x >= left) & (x < left + wide)
    return rows[:, :, None] & columns[:, None]


def _uniform(shape: tuple[int, ...], bounds: tuple[float, float], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator) * (bounds[1] - bounds[0]) + bounds[0]


def crop_and_resize(
    images: Tensor, boxes: Tensor, flips: Tensor, *, size: tuple[int, int], interpolation: str
) -> Tensor:
    """B C H W from B C h w, both float.

    boxes: B 4. flips: B, bool, which results are flipped horizontally.
    """
    top, left, height, width = boxes.unbind(1)
    kernel = KERNELS[interpolation]
    rows = _resize_weights(top, height, stored=images.shape[2], target=size[0], kernel=kernel)  # B H h
    columns = _resize_weights(left, width, stored=images.shape[3], target=size[1], kernel=kernel)  # B W w
    columns = torch.where(flips[:, None, None], columns.flip(1), columns)
    narrow = images.flatten(1, 2) @ columns.mT  # B Ch W, one product per image for all channels
    return rows[:, None] @ narrow.unflatten(1, images.shape[1:3])


def _resize_weights(
    start: Tensor, length: Tensor, *, stored: int, target: int, kernel: Callable[[Tensor], Tensor]
) -> Tensor:
    """Weight of each of `stored` pixels in each of `target` pixels along one axis: B target stored.

    start, length: B, the interval that is resized; pixels outside have weight 0.
    """
    scale = (length / target)[:, None, None]
    pixels = torch.arange(stored, device=start.device) + 0.5
    centers = start[:, None, None] + (torch.arange(target, device=start.device)[:, None] + 0.5) * scale  # B target 1
    weights = kernel((pixels - centers).abs() / scale.clamp(min=1))
    end = (start + length)[:, None, None]
    weights = torch.where((pixels > start[:, None, None]) & (pixels < end), weights, 0)
    return weights / weights.sum(2, keepdim=True)


def _linear(distance: Tensor) -> Tensor:
    return (1 - distance).clamp(min=0)


def _cubic(distance: Tensor) -> Tensor:
    """Keys' kernel with a = -1/2, as in Pillow; torch's bicubic without antialiasing has a = -3/4."""
    near = (1.5 * distance - 2.5) * distance.square() + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0))


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {"bilinear": _linear, "bicubic": _cubic}
