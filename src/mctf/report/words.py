"""The everyday name of every class of a model, where it is known."""

from typing import Any

from ..data.classes import IMAGENET_CLASSES


def class_words(model: Any) -> tuple[str, ...]:
    """One name a class: as the model's config has it, else ImageNet's for a thousand classes, else its number.

    The config speaks of the weights that the model was published with: it counts where the classes are as many.
    """
    count: int = model.num_classes
    config = getattr(model, "pretrained_cfg", None) or {}
    labels = config.get("label_names") or ()
    if len(labels) == count:
        described = config.get("label_descriptions") or {}
        return tuple(_first(described.get(label, label)) for label in labels)
    if count == IMAGENET_CLASSES:
        from timm.data import ImageNetInfo

        known = ImageNetInfo()
        return tuple(_first(known.index_to_description(number)) for number in range(count))
    return tuple(f"class {number}" for number in range(count))


def _first(names: str) -> str:
    """The first of several synonyms between commas."""
    return names.split(",")[0]
