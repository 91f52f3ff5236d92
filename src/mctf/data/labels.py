"""Class numbering: which index a class has, by a table, a known dataset, a model or the order of names."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from timm.data import ImageNetInfo
from torch import Tensor

from .._utils import plural
from ..errors import MctfError
from ..models.class_names import IMAGENET_CLASSES, TINY_IMAGENET_CLASSES, class_names
from .decode import ReadLimits, UnreadableError, read_file

_TABLE_LIMITS = ReadLimits(max_bytes=2**26)
_MAX_CLASSES = 1_000_000
_MAX_DIGITS = 9
_TABLE_FORMAT = "expected lines of index, folder and name between tabs"


def number_classes(names: Iterable[str], *, order: Sequence[str] | None = None) -> dict[str, int]:
    """`class_to_idx` in the dataset's own order where it has one, else in the order of names."""
    return {name: index for index, name in enumerate(order or sorted(set(names)))}


def number_for_model(
    names: Collection[str], *, num_classes: int, table: Path | None = None, order: Sequence[str] | None = None
) -> tuple[dict[str, int] | None, tuple[str, ...]]:
    """`class_to_idx` for a model of `num_classes` classes, None where it is undetermined; and notes for the user.

    The first rule that applies: the table; the wnids of ImageNet or Tiny-ImageNet, where the model has as many
    classes; the dataset's own order or the order of names, where there are as many classes as the model has.
    """
    if table is not None:
        class_to_idx = read_class_table(table, num_classes=num_classes)
        count = len(set(class_to_idx.values()))
        notes = () if count == num_classes else (f"{table} describes {count} of the model's {num_classes} classes",)
        return class_to_idx, notes
    distinct = set(names)
    class_to_idx = _wnids(num_classes)
    if class_to_idx.keys() >= distinct:
        # other datasets of 200 classes are named by wnids, too
        tiny = num_classes == TINY_IMAGENET_CLASSES
        return class_to_idx, ("classes are numbered as in Tiny-ImageNet",) if tiny else ()
    if order is not None and len(order) == num_classes:
        return number_classes(names, order=order), ("classes are numbered as in the dataset",)
    if order is None and len(distinct) == num_classes:
        return number_classes(names), ("classes are numbered by folder name",)
    return None, (
        f"accuracy is unknown: {plural(len(order or distinct), 'class', 'classes')} of images cannot determine the "
        f"model's {num_classes} classes; give a table of them (--classes)",
    )


def encode_targets(names: Iterable[str], class_to_idx: Mapping[str, int], *, source: str, cure: str) -> Tensor:
    """One class index per name, int64; raises MctfError for a class without an index."""
    targets = []
    for name in names:
        if name not in class_to_idx:
            raise MctfError(f"class {name!r} of {source} {cure}")
        targets.append(class_to_idx[name])
    return torch.tensor(targets, dtype=torch.int64)


def read_class_table(path: Path, *, num_classes: int | None = None) -> dict[str, int]:
    """`class_to_idx` from a TSV file of index, folder and name; raises MctfError where it is malformed.

    num_classes: of the model, where a larger index is refused.
    """
    if not os.path.exists(path):
        raise MctfError(f"there is no class table {path}: {_TABLE_FORMAT}")
    try:
        text = read_file(path, _TABLE_LIMITS).decode("utf-8-sig")
    except UnreadableError as error:
        raise MctfError(f"the class table {path} cannot be read ({error}): {_TABLE_FORMAT}") from None
    except UnicodeDecodeError:
        raise MctfError(f"{path} is not UTF-8 text: {_TABLE_FORMAT}") from None
    class_to_idx: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) < 2 or not columns[0].isdecimal() or not columns[1]:
            raise MctfError(f"line {number} of {path} is {line[:60]!r}: expected index, folder and name between tabs")
        folder = columns[1]
        index = int(columns[0]) if len(columns[0]) <= _MAX_DIGITS else _MAX_CLASSES
        if folder in class_to_idx:
            raise MctfError(f"line {number} of {path} names {folder[:60]!r} again: give every folder one line")
        if num_classes is not None and index >= num_classes:
            raise MctfError(
                f"{path} has class {columns[0][:20]}, but the model has {num_classes} classes: use the model's table"
            )
        if index >= _MAX_CLASSES:
            raise MctfError(f"line {number} of {path} has class {columns[0][:20]}: number the classes from 0")
        class_to_idx[folder] = index
    if not class_to_idx:
        raise MctfError(f"{path} is empty: {_TABLE_FORMAT}")
    return class_to_idx


def _wnids(num_classes: int) -> dict[str, int]:
    """Class index by wnid of the dataset with that many classes; empty for other numbers."""
    if num_classes == TINY_IMAGENET_CLASSES:
        return number_classes((), order=list(class_names()))
    if num_classes == IMAGENET_CLASSES:
        return number_classes((), order=ImageNetInfo("imagenet-1k").label_names())
    return {}
