"""JPEG files decoded on the GPU (`torchvision.io.decode_jpeg`), then resized and cropped there as on the CPU.

Pixels differ from those of Pillow by a few steps of 255: nvJPEG rounds differently, and tensors are resized in float32.

Axes: B images, 3 H W.
"""

import io
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .._utils import first_line
from ..data.decode import ReadLimits, UnreadableError
from ..errors import MctfError, is_out_of_memory

_END = b"\xff\xd9"


def is_plain_jpeg(content: bytes, limits: ReadLimits) -> bool:
    """Whether the GPU may decode it: a whole color or gray JPEG within the limits; the CPU says what is wrong."""
    if content[:3] != b"\xff\xd8\xff" or not content.rstrip(b"\0").endswith(_END):
        return False
    try:
        limits.check_bytes(len(content))
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:  # reads the header alone
            limits.check_size(*image.size)
            return image.mode in ("RGB", "L")
    except (UnreadableError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False


def check_gpu_decoding(device: torch.device) -> None:
    """Raise MctfError where JPEG files cannot be decoded on this device."""
    if device.type != "cuda":
        raise MctfError(f"--decode gpu needs a CUDA device, but the model runs on {device}: leave it out")
    try:
        from torchvision.io import decode_jpeg

        picture = io.BytesIO()
        Image.new("RGB", (16, 16)).save(picture, "JPEG")
        decode_jpeg(torch.frombuffer(bytearray(picture.getvalue()), dtype=torch.uint8), device=device)
    except (RuntimeError, ImportError, AttributeError) as failure:
        raise MctfError(
            f"this torchvision decodes no JPEG on the GPU ({first_line(failure):.120}): leave out --decode gpu"
        ) from None


class GpuDecoder:
    """Encoded images to 3 H W uint8 on the device, None where it refuses one; images of one size are resized together.

    Raises MctfError where it is the device that fails.
    """

    def __init__(self, transform: Any, device: torch.device) -> None:
        self.steps = list(transform.transforms)[:-1]  # without the step from PIL to a tensor
        self.device = device

    def __call__(self, encoded: Sequence[Tensor]) -> list[Tensor | None]:
        try:
            return self._resize(self._decode(list(encoded)))
        except RuntimeError as failure:
            if not _is_of_device(failure):
                raise
            raise MctfError(
                f"{self.device} fails while it decodes JPEG files ({first_line(failure):.120}): lower the batch size, "
                "or leave out --decode gpu"
            ) from None

    def _resize(self, decoded: list[Tensor | None]) -> list[Tensor | None]:
        by_size: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, image in enumerate(decoded):
            if image is not None:
                by_size[tuple(image.shape)].append(index)
        for indices in by_size.values():
            images = torch.stack([decoded[index] for index in indices])  # type: ignore[misc]
            for step in self.steps:
                images = step(images)
            for index, image in zip(indices, images, strict=True):
                decoded[index] = image
        return decoded

    def _decode(self, encoded: list[Tensor]) -> list[Tensor | None]:
        from torchvision.io import ImageReadMode, decode_jpeg

        try:
            return list(decode_jpeg(encoded, mode=ImageReadMode.RGB, device=self.device))
        except RuntimeError as failure:
            if _is_of_device(failure):
                raise
            if len(encoded) == 1:
                return [None]
        return [each for one in encoded for each in self._decode([one])]


def _is_of_device(failure: RuntimeError) -> bool:
    """Whether the device failed, out of memory as a rule, and not the image."""
    return is_out_of_memory(failure) or "CUDA error" in str(failure)
