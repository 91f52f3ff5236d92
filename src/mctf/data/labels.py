"""The class index of every image, from the name of the folder it lies in."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import MctfError
from ..models.class_names import IMAGENET_CLASSES, TINY_IMAGENET_CLASSES, class_names
from .files import ImageFiles


@dataclass(frozen=True)
class Labels:
    """What is known of the classes.

    indices: one class index an image, None where they are unknown. notes: what the user should know about them.
    """

    indices: tuple[int, ...] | None
    notes: tuple[str, ...] = ()


_NO_FOLDERS = Labels(None, ("the images lie in no class folders, so accuracy is unknown",))


def find_labels(images: ImageFiles, *, num_classes: int, table: Path | None = None) -> Labels:
    """Labels for a model of `num_classes` classes.

    table: a TSV file of index, folder name and human name. Without one, folders named by wnids of ImageNet or
    Tiny-ImageNet have the order of that dataset if the model has as many classes, and as many folders as classes have
    the order of their names; otherwise nothing is known.
    """
    known = None if table is None else read_classes(table, num_classes=num_classes)
    if num_classes == 0:
        return Labels(None)
    if images.folders is None:
        return _NO_FOLDERS
    if known is not None:
        indices = _look_up(images.folders, known, images.path, _not_in(table))
        return Labels(indices, _coverage(known, num_classes, table))
    folders = sorted(set(images.folders))
    order = _dataset_order(num_classes)
    if order.keys() >= set(folders):
        return Labels(tuple(order[folder] for folder in images.folders), _dataset_notes(num_classes))
    if len(folders) == num_classes:
        order = {folder: index for index, folder in enumerate(folders)}
        return Labels(tuple(order[folder] for folder in images.folders), ("classes are numbered by folder name",))
    note = (
        f"accuracy is unknown: {len(folders)} class folders cannot be told apart among the model's {num_classes} "
        "classes without a table of them (--classes)"
    )
    return Labels(None, (note,))


def trained_labels(images: ImageFiles, known: Mapping[str, int]) -> Labels:
    """Labels for a model that was trained on the classes `known`, an index by name. There may be fewer here."""
    if images.folders is None:
        return _NO_FOLDERS
    return Labels(_look_up(images.folders, known, images.path, "is none of the classes trained on: remove it there"))


def number_classes(
    names: Sequence[str], *, place: str, table: Path | None = None, order: Sequence[str] | None = None
) -> tuple[Tensor, dict[str, int]]:
    """Labels to train on (int64, one a name) and the index of each class by name; every class has images.

    names: the class of every image. table: as for `find_labels`. order: all classes by index; without it and
    without a table, they are numbered by name. Raises MctfError where a class has no images or no index.
    """
    known = read_classes(table) if table else {name: index for index, name in enumerate(order or sorted(set(names)))}
    absent = sorted(set(known) - set(names))
    if absent:
        raise MctfError(
            f"{place} holds no images of class {absent[0]!r} ({len(absent)} of {len(known)} classes have none): "
            f"add them, or remove the class from {table or 'the dataset'}"
        )
    indices = _look_up(names, known, place, _not_in(table))
    unnamed = sorted(set(range(max(known.values()) + 1)) - set(known.values()))
    if unnamed:
        raise MctfError(f"{table} gives no folder for class {unnamed[0]}: number the classes from 0 without gaps")
    return torch.tensor(indices), known


def read_classes(path: Path, *, num_classes: int | None = None) -> dict[str, int]:
    """Class index by folder name, from a TSV file; raises MctfError where it is malformed or of another model."""
    if not path.is_file():
        raise MctfError(f"there is no class table {path}: expected lines of index, folder and name between tabs")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise MctfError(f"{path} is no UTF-8 text: expected lines of index, folder and name between tabs") from None
    known: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        index, folder = _read_line(line, f"line {number} of {path}")
        if folder in known:
            raise MctfError(f"line {number} of {path} names {folder!r} again: give every folder one line")
        if num_classes is not None and index >= num_classes:
            raise MctfError(f"{path} has class {index}, but the model has {num_classes} classes: use the model's table")
        known[folder] = index
    if not known:
        raise MctfError(f"{path} is empty: expected lines of index, folder and name between tabs")
    return known


def _read_line(line: str, place: str) -> tuple[int, str]:
    fields = [field.strip() for field in line.split("\t")]
    if len(fields) < 2 or not fields[0].isdecimal() or not fields[1]:
        raise MctfError(f"{place} is {line[:60]!r}: expected index, folder and name between tabs")
    return int(fields[0]), fields[1]


def _not_in(table: Path | None) -> str:
    return f"is not in {table}: add a line for it there"


def _look_up(folders: Iterable[str], known: Mapping[str, int], place: object, trouble: str) -> tuple[int, ...]:
    indices = []
    for folder in folders:
        if folder not in known:
            raise MctfError(f"class folder {folder!r} of {place} {trouble}")
        indices.append(known[folder])
    return tuple(indices)


def _coverage(known: dict[str, int], num_classes: int, table: Path | None) -> tuple[str, ...]:
    """A note where the table may be of another model with more or fewer classes."""
    count = len(set(known.values()))
    return () if count == num_classes else (f"{table} describes {count} of the model's {num_classes} classes",)


def _dataset_order(num_classes: int) -> dict[str, int]:
    """Class index by wnid of the dataset that is known to have so many classes; empty where none is."""
    if num_classes == TINY_IMAGENET_CLASSES:
        wnids = list(class_names())
    elif num_classes == IMAGENET_CLASSES:
        from timm.data import ImageNetInfo

        wnids = ImageNetInfo("imagenet-1k").label_names()
    else:
        wnids = []
    return {wnid: index for index, wnid in enumerate(wnids)}


def _dataset_notes(num_classes: int) -> tuple[str, ...]:
    """Other datasets have 200 classes named by wnids as well, so it is said which one these were taken for."""
    return ("classes are numbered as in Tiny-ImageNet",) if num_classes == TINY_IMAGENET_CLASSES else ()
