"""Whole batches augmented on their device, as timm would do it image by image.

All that is random is drawn on the CPU and sent along, so a CPU and a GPU are given the same numbers. Few passes go over
pixels of the result: colours change before the resizing, where there are fewer of them.

Axes: B images, h w stored pixels, H W pixels of the result.
"""

import torch
from torch import Tensor

from .augmentation import ERASING
from .boxes import covering_size, draw_boxes, draw_crops, inside
from .feed import FeedOptions
from .moving import drawing_alone, send
from .operations import brightness, contrast, saturation
from .randaugment import draw_rounds, motions, move, recolour
from .resampling import crop_and_resize

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
