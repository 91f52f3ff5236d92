"""The 200 classes of Tiny-ImageNet: their wnids, which name folders of images, and their names."""

from functools import cache
from importlib.resources import files
from typing import Any

IMAGENET_CLASSES = 1000
TINY_IMAGENET_CLASSES = 200


@cache
def class_names() -> dict[str, str]:
    """The names of every class by its wnid, synonyms between commas; in the order in which models number them."""
    text = (files("mctf") / "data_files" / "tiny_imagenet_classes.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()]  # index, wnid, names
    return {wnid: names for _, wnid, names in rows}


# MERGED from mctf.models.class_names:
# The everyday name of every class of a model, where it is known.


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
