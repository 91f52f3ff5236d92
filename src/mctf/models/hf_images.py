"""Models of transformers with the interface of timm's: images in, one tensor out, preprocessing in `pretrained_cfg`.

Axes: B images, C channels, K classes.
"""

import json
import threading
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MctfError
from ..hosts.hf import HFVision, find_tower
from ..hosts.hf_sequences import PackedLayerOps
from ..hosts.hf_towers import ops_class

_HEADS = ("classifier", "cls_classifier")
_RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by PIL's numbers


@dataclass(frozen=True)
class Features:
    """Logits, B K, and the input of the classifier, B C. Without a classifier both are the pooled features."""

    logits: Tensor
    pooled: Tensor


class ImageModel(nn.Module):
    """One model of transformers with timm's method names.

    pretrained_cfg: how images are prepared, as timm records it. num_classes: 0 for a model without classifier.
    projection: of pooled features into the space that images share with texts, where the model has one and it is kept.
    class_token: whether the first token is one. protected: leading tokens that are no patches.
    """

    main_input_name = "pixel_values"

    def __init__(
        self, model: nn.Module, pretrained_cfg: dict[str, Any], *, num_classes: int, projection: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.model = model
        if projection is not None:
            self.projection = projection
        self.pretrained_cfg = pretrained_cfg
        self.num_classes = num_classes
        host = HFVision.of(model)
        self.class_token, self.protected = host.class_token, host.protected
        parameters = signature(type(model).forward).parameters
        self._interpolates = "interpolate_pos_encoding" in parameters
        self._shuffles = "noise" in parameters

    @classmethod
    def of(
        cls,
        model: Any,
        preprocessing: dict[str, Any],
        *,
        image_size: tuple[int, int] | None = None,
        keep_projection: bool = False,
    ) -> "ImageModel":
        """The whole model where it is a classifier, else its vision tower; for images of the given size.

        keep_projection: keep what `get_image_features` applies to the pooled features, a linear layer in CLIP.
        """
        _, tower = find_tower(model)
        _check_takes_images(model, tower)
        head = next((getattr(model, name) for name in _HEADS if hasattr(model, name)), None)
        config = {"input_size": (3, *_pair(tower.config.image_size))} | preprocessing
        config["architecture"] = type(model).__name__
        if image_size is not None:
            config["input_size"] = (3, *image_size)
        classes = 0 if head is None else model.config.num_labels
        projection = getattr(model, "visual_projection", None) if keep_projection else None
        return cls(tower if head is None else model, config, num_classes=classes, projection=projection)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Logits of a classifier, B K; else pooled features, B C."""
        output = self.model(pixel_values=pixel_values, **self._options(pixel_values))
        if self.num_classes:
            return output.logits
        pooled = getattr(output, "pooler_output", None)
        if pooled is not None:
            return pooled
        tokens = output.last_hidden_state
        return tokens[:, 0] if self.class_token else tokens[:, self.protected :].mean(dim=1)

    @property
    def has_projection(self) -> bool:
        return hasattr(self, "projection")

    @property
    def pools_by_attention(self) -> bool:
        """Whether the tower pools by a learned query, as those of SigLIP and AIMv2, and no classifier replaces that."""
        if self.num_classes:
            return False
        head = getattr(find_tower(self.model)[1], "head", None)
        return any(isinstance(getattr(head, name, None), nn.Parameter) for name in ("probe", "cls_token"))

    def forward_tokens(self, pixel_values: Tensor) -> Tensor:
        """The last hidden state of the vision tower, B N C."""
        _, tower = find_tower(self.model)
        return tower(pixel_values=pixel_values, **self._options(pixel_values)).last_hidden_state

    def _options(self, pixel_values: Tensor) -> dict[str, Any]:
        config: Any = self.model.config
        config = getattr(config, "vision_config", config)
        height, width = pixel_values.shape[2:]
        options: dict[str, Any] = {}
        if self._interpolates and (height, width) != _pair(config.image_size):
            options["interpolate_pos_encoding"] = True
        if self._shuffles:  # ViTMAE sorts patches by noise: increasing numbers keep their order
            patches = (height // config.patch_size) * (width // config.patch_size)
            options["noise"] = torch.arange(patches, device=pixel_values.device).expand(len(pixel_values), -1)
        return options

    def forward_features(self, images: Tensor) -> Features:
        """Everything that `forward_head` returns; one pass computes both."""
        heads: list[Any] = [getattr(self.model, name) for name in _HEADS if hasattr(self.model, name)]
        if not heads:
            pooled = self(images)
            return Features(pooled, pooled)
        inputs: list[Tensor] = []
        thread = threading.get_ident()

        def record(head: nn.Module, args: tuple[Tensor, ...]) -> None:
            if threading.get_ident() == thread:
                inputs.append(args[0])

        handle = heads[0].register_forward_pre_hook(record)
        try:
            logits = self(images)
        finally:
            handle.remove()
        return Features(logits, inputs[0])

    def forward_head(self, features: Features, pre_logits: bool = False) -> Tensor:
        return features.pooled if pre_logits else features.logits


def _check_takes_images(model: nn.Module, tower: Any) -> None:
    """Raise MctfError for a tower that takes other things than images, or gives other things than tokens."""
    config, layer = tower.config, type(next(iter(HFVision.of(tower).container.children())))
    if issubclass(ops_class(layer), PackedLayerOps):
        why = "packs the patches of all images into one sequence, so that no vector belongs to one image"
    elif hasattr(config, "num_frames"):
        why = "takes videos, not images"
    elif hasattr(config, "num_mel_bins"):
        why = "takes spectrograms, not images"
    elif type(tower).__name__.endswith("Backbone"):
        why = "gives feature maps, no tokens of which a vector is made"
    elif not hasattr(config, "image_size"):
        why = "takes patches, not images"
    else:
        return
    name = f"{type(tower).__module__}.{type(tower).__name__}"
    inside = "" if tower is model else f", the tower of {type(model).__name__},"
    raise MctfError(f"{name}{inside} {why}: fuse it with mctf.fuse(model) and run it yourself")


def processor_config(processor: Any) -> dict[str, Any]:
    """The contents of a preprocessor_config.json, from an image processor of transformers or one that holds it."""
    processor = getattr(processor, "image_processor", processor)
    if isinstance(processor, dict):
        return processor
    if not hasattr(processor, "to_json_string"):
        raise MctfError(
            f"processor={type(processor).__name__} is no image processor of transformers: pass "
            "AutoImageProcessor.from_pretrained(NAME)"
        )
    return json.loads(processor.to_json_string())


def read_preprocessing(given: dict[str, Any]) -> dict[str, Any]:
    """From the contents of a preprocessor_config.json to the entries of a timm `pretrained_cfg`."""
    read: dict[str, Any] = {}
    crop = _read_size(given.get("crop_size")) if given.get("do_center_crop") else None
    size = _read_size(given.get("size")) if given.get("do_resize", True) else None
    if crop is not None:
        read["input_size"] = (3, *crop)
        read["crop_pct"] = 1.0 if size is None else min(crop) / min(size)
    elif size is not None:  # resized to this size whatever the shape of the image
        read |= {"input_size": (3, *size), "crop_pct": 1.0, "crop_mode": "squash"}
    if given.get("resample") is not None:
        read["interpolation"] = _RESAMPLING[given["resample"]]
    return read | _read_normalization(given)


def _read_normalization(given: dict[str, Any]) -> dict[str, Any]:
    """Mean and standard deviation for pixels between 0 and 1, as timm's transforms give them."""
    factor = 255 * given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 255.0
    if given.get("do_normalize", True):
        mean, std = given.get("image_mean"), given.get("image_std")
        if mean is None or std is None:
            return {}
    else:
        mean, std = [0.0] * 3, [1.0] * 3
    return {"mean": tuple(each / factor for each in mean), "std": tuple(each / factor for each in std)}


def _read_size(size: Any) -> tuple[int, int] | None:
    """Height and width; one number or the shortest edge holds for both."""
    if size is None or isinstance(size, int):
        return None if size is None else (size, size)
    if "shortest_edge" in size:
        return size["shortest_edge"], size["shortest_edge"]
    if "height" in size and "width" in size:
        return size["height"], size["width"]
    raise MctfError(f"image size {size} is not supported: expected height and width, or shortest_edge")


def _pair(size: Any) -> tuple[int, int]:
    """Height and width of an image size that may be one number."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
