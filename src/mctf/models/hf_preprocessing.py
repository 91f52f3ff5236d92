"""What transformers' image processors do to an image, in the words timm has for it."""

from typing import Any

from PIL import Image

from ..errors import MctfError


def read_preprocessing(given: dict[str, Any]) -> dict[str, Any]:
    """From the contents of a preprocessor_config.json to the entries of a timm `pretrained_cfg`."""
    read: dict[str, Any] = {}
    crop = _sides(given.get("crop_size")) if given.get("do_center_crop") else None
    size = _sides(given.get("size")) if given.get("do_resize", True) else None
    if crop is not None:
        read["input_size"] = (3, *crop)
        read["crop_pct"] = 1.0 if size is None else min(crop) / min(size)
    elif size is not None:  # resized to this size whatever the image's shape was
        read |= {"input_size": (3, *size), "crop_pct": 1.0, "crop_mode": "squash"}
    if given.get("resample") is not None:
        read["interpolation"] = Image.Resampling(given["resample"]).name.lower()
    return read | _normalisation(given)


def _normalisation(given: dict[str, Any]) -> dict[str, Any]:
    """Mean and deviation for pixels between 0 and 1, which is what timm's transforms give."""
    factor = 255 * given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 255.0
    if given.get("do_normalize", True):
        mean, std = given.get("image_mean"), given.get("image_std")
        if mean is None or std is None:
            return {}
    else:
        mean, std = [0.0] * 3, [1.0] * 3
    return {"mean": tuple(each / factor for each in mean), "std": tuple(each / factor for each in std)}


def _sides(size: Any) -> tuple[int, int] | None:
    """Height and width; the shortest edge stands for both."""
    if size is None or isinstance(size, int):
        return None if size is None else (size, size)
    if "shortest_edge" in size:
        return size["shortest_edge"], size["shortest_edge"]
    if "height" in size and "width" in size:
        return size["height"], size["width"]
    raise MctfError(f"an image size of {size} is not understood: expected height and width, or shortest_edge")
