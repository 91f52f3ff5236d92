"""Images from files, and what a model sees of them as people see it."""

from pathlib import Path

import torch
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
