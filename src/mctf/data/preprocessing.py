"""What a model wants done to an image before it sees it, as timm records it.

Axes: images are 3 H W after it, float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor, nn

Transform = Callable[[Image.Image], Tensor]


@dataclass(frozen=True)
class Preprocessing:
    """Resize so that the crop takes `crop_pct` of the shorter side, crop the middle, normalise.

    image_size: height and width of the crop.
    """

    image_size: tuple[int, int]
    crop_pct: float
    crop_mode: str
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, model: nn.Module, *, crop_pct: float | None = None) -> "Preprocessing":
        """The model's own, for the image size it has; with another crop where one is given."""
        from timm.data import resolve_model_data_config

        config = resolve_model_data_config(model)
        made_for = getattr(getattr(model, "patch_embed", None), "img_size", None)
        height, width = made_for or config["input_size"][1:]
        return cls(
            image_size=(height, width),
            crop_pct=crop_pct or config["crop_pct"],
            crop_mode=config["crop_mode"],
            interpolation=config["interpolation"],
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
        )

    def transform(self) -> Transform:
        """From a PIL image to the model's input. An image that has the size already is not resampled."""
        from timm.data import create_transform
        from timm.data.transforms import ResizeKeepRatio, str_to_interp_mode

        made: Any = create_transform(
            input_size=(3, *self.image_size),
            crop_pct=self.crop_pct,
            crop_mode=self.crop_mode,
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
        )
        for step in made.transforms:
            if isinstance(step, ResizeKeepRatio):  # timm makes it for oblong crops, always bilinear
                step.interpolation = str_to_interp_mode(self.interpolation)
        return made
