"""Names of classes: Tiny-ImageNet's by wnid, and the labels of a model's outputs."""

from functools import cache
from importlib.resources import files
from typing import Any

from torch import nn

IMAGENET_CLASSES = 1000
TINY_IMAGENET_CLASSES = 200


@cache
def class_names() -> dict[str, str]:
    """The 200 classes of Tiny-ImageNet: wnid (the name of an image folder) -> names, separated by commas.

    The order is that of the class indices.
    """
    text = (files("mctf") / "data_files" / "tiny_imagenet_classes.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()]  # index, wnid, names
    return {wnid: names for _, wnid, names in rows}


def class_labels(model: Any) -> tuple[str, ...]:
    """One label per class of a model.

    Labels come from its `pretrained_cfg` where that has as many as the model has classes. A model with 1000 classes
    has those of ImageNet. Others are numbered: "class 0", "class 1", ….
    """
    count: int = model.num_classes
    config = getattr(model, "pretrained_cfg", None) or {}
    labels = config.get("label_names") or ()
    if len(labels) == count:
        descriptions = config.get("label_descriptions") or {}
        return tuple(_first_synonym(descriptions.get(label, label)) for label in labels)
    if count == IMAGENET_CLASSES:
        from timm.data import ImageNetInfo

        info = ImageNetInfo()
        return tuple(_first_synonym(info.index_to_description(index)) for index in range(count))
    return tuple(f"class {index}" for index in range(count))


def has_projection(model: Any) -> bool:
    """Whether a model projects into a space shared with texts, as CLIP does.

    The head of timm's CLIP models is the projection unless it was fine-tuned for other outputs.
    """
    if isinstance(getattr(model, "projection", None), nn.Module):  # an `ImageModel` of transformers
        return True
    config = getattr(model, "pretrained_cfg", None) or {}
    is_clip = "_clip_" in str(config.get("architecture", "")) and "ft_in" not in str(config.get("tag", ""))
    outputs = getattr(model, "num_classes", 0)
    return is_clip and bool(outputs) and outputs == config.get("num_classes", outputs)


def _first_synonym(names: str) -> str:
    return names.split(",")[0]
