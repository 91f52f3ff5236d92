"""Small tensors made on the host, and on their way to a device."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .feed import FeedOptions
from .gpu_randaugment import brightness, contrast, draw_rounds, drawing_alone, motions, move, recolour, saturation, send
from .transforms import ERASING

# MERGED from mctf.data.gpu_augment:
# Random rectangles in pictures of one size, many at a time: what crops keep and what erasing takes away.
#
# Axes: B rectangles; a rectangle is top, left, height and width in whole pixels, float32.

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


# MERGED from mctf.data.gpu_augment:
# Crops, flips and resizing of a whole batch as two matrix products, each image with a crop of its own.
#
# The numbers are those of Pillow's `crop` and `resize`: the same kernels, which widen where pixels get fewer, so
# that nothing aliases; only its rounding to whole levels after each direction is left out.
#
# Axes: B images, h w pixels of the stored image, H W pixels of the result.


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


# MERGED from mctf.data.gpu_augment:
# Whole batches augmented on their device, as timm would do it image by image.
#
# All that is random is drawn on the CPU and sent along, so a CPU and a GPU are given the same numbers. Few passes go over
# pixels of the result: colours change before the resizing, where there are fewer of them.
#
# Axes: B images, h w stored pixels, H W pixels of the result.

_ERASED_SCALE, _ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)


class BatchAugmentation:
    """From stored images to inputs of the model, after `options`."""

    def __init__(self, options: FeedOptions, device: torch.device) -> None:
        self.options = options
        self.device = device
        self.mean = torch.tensor(options.mean, device=device)[:, None, None] * 255
        self.std = torch.tensor(options.std, device=device)[:, None, None] * 255

    def __call__(self, stored: Tensor, generator: torch.Generator) -> Tensor:
        """B 3 H W, float32 and normalised, from B 3 h w, uint8. generator: on the CPU."""
        # reduced precision would posterize every image
        with torch.autocast(self.device.type, enabled=False), drawing_alone(self.device):
            return self._augment(stored.float(), generator)

    def _augment(self, images: Tensor, generator: torch.Generator) -> Tensor:
        options, count = self.options, len(images)
        rounds = draw_rounds(count, generator) if options.augmentation == "strong" else ()
        if rounds:
            images = recolour(images, tuple(each.to(self.device) for each in rounds))
        images = self._jitter(images, generator)
        images = self._normalise(self._crop(images, generator))
        if rounds:
            rows, matrices = (send(part, self.device) for part in motions(rounds, options.image_size))
            images.index_copy_(0, rows, move(images[rows], matrices))
            self._erase(images, generator)
        return images

    def _crop(self, images: Tensor, generator: torch.Generator) -> Tensor:
        options, count, size = self.options, len(images), (images.shape[2], images.shape[3])
        if options.augmentation == "none":
            return self._crop_the_middle(images)
        boxes = draw_crops(count, size, scale=options.crop_scale, generator=generator)
        flips = torch.rand(count, generator=generator) < 0.5
        return self._resize(images, boxes, flips, size=options.image_size)

    def _crop_the_middle(self, images: Tensor) -> Tensor:
        """As evaluation does it: the whole image is resized before it is cropped."""
        (height, width), count = self.options.image_size, len(images)
        whole = torch.tensor([0.0, 0.0, *images.shape[2:]]).expand(count, 4)
        size = covering_size((images.shape[2], images.shape[3]), (height, width))
        resized = self._resize(images, whole, torch.zeros(count, dtype=torch.bool), size=size)
        top, left = round((size[0] - height) / 2), round((size[1] - width) / 2)
        return resized[:, :, top : top + height, left : left + width].contiguous()

    def _resize(self, images: Tensor, boxes: Tensor, flips: Tensor, *, size: tuple[int, int]) -> Tensor:
        boxes, flips = send(boxes, self.device), send(flips, self.device)
        return crop_and_resize(images, boxes, flips, size=size, interpolation=self.options.interpolation)

    def _jitter(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Always in this order, where torchvision shuffles the three."""
        most = self.options.colour_jitter
        if self.options.augmentation == "none" or not most:
            return images
        factors = 1 + (torch.rand(3, len(images), generator=generator) * 2 - 1) * most
        for change, amounts in zip((brightness, contrast, saturation), send(factors, self.device), strict=True):
            images = change(images, amounts)
        return images

    def _normalise(self, images: Tensor) -> Tensor:
        """In place. The clamp takes back what bicubic kernels add beyond black and white."""
        return images.clamp_(0, 255).sub_(self.mean).div_(self.std)

    def _erase(self, images: Tensor, generator: torch.Generator) -> None:
        """In place: noise in a rectangle of some images. All of a batch look through to the same noise, which is
        another in the next batch: noise for each would take longer to draw than all the rest.
        """
        count, size = len(images), self.options.image_size
        boxes, fits = draw_boxes(count, size, scale=_ERASED_SCALE, ratio=_ERASED_RATIO, generator=generator)
        chosen = (fits & (torch.rand(count, generator=generator) < ERASING)).nonzero().squeeze(1)
        noise = send(torch.randn(3, *size, generator=generator), self.device)
        rows, boxes = send(chosen, self.device), send(boxes[chosen], self.device)
        images.index_copy_(0, rows, torch.where(inside(boxes, size)[:, None], noise, images[rows]))
