"""Images from files to what a model sees, and back to what people see."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm.data
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from ..errors import MctfError


def open_image(path: Path) -> Image.Image:
    """An RGB image, upright, wholly decoded; raises MctfError for what is missing, damaged or no image."""
    if not path.is_file():
        raise MctfError(f"there is no image file {path}")
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as failure:  # decoders of damaged files raise whatever they trip over
        raise MctfError(f"{path} cannot be read as an image: {str(failure).splitlines()[0]}") from None


@dataclass(frozen=True)
class Preparation:
    """The evaluation transform of one model: resize, crop, normalise, all as timm knows them for its weights."""

    transform: Any
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, model: Any) -> "Preparation":
        config = timm.data.resolve_model_data_config(model)
        height, width = model.patch_embed.img_size or config["input_size"][1:]
        config["input_size"] = (config["input_size"][0], height, width)
        return cls(timm.data.create_transform(**config, is_training=False), config["mean"], config["std"])

    def tensor(self, image: Image.Image) -> Tensor:
        """What the model sees, 3 H W."""
        return self.transform(image)

    def picture(self, tensor: Tensor) -> Image.Image:
        """The crop that became this tensor."""
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return to_pil_image((tensor.cpu() * std + mean).clamp(0, 1))
