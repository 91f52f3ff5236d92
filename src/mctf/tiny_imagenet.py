"""The 200 classes of Tiny-ImageNet: their wnids, which name folders of images, and their names."""

from functools import cache
from importlib.resources import files

CLASSES = 200


@cache
def class_names() -> dict[str, str]:
    """The names of every class by its wnid, synonyms between commas; in the order in which models number them."""
    text = (files("mctf") / "data_files" / "tiny_imagenet_classes.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()]  # index, wnid, names
    return {wnid: names for _, wnid, names in rows}
