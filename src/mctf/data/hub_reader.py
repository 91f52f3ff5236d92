"""Reader of a dataset of the Hugging Face hub: its image column, and its label column where there is one."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from .._utils import first_line, optional_import, plural
from ..errors import MctfError
from .decode import DEFAULT_LIMITS, ReadLimits, UnreadableError, decode_image, read_file

HUB_PREFIX = "hf:"
_IMAGE_COLUMNS = ("image", "img", "pixel_values")
_LABEL_COLUMNS = ("label", "labels", "fine_label", "class")


class HubDataset(Protocol):
    """The part of `datasets.Dataset` in use: rows by index, columns by name, and the type of every column."""

    features: Mapping[str, Any]

    def __len__(self) -> int: ...
    def __getitem__(self, key: Any) -> Any: ...


def load_hub_dataset(spec: str) -> HubDataset:
    """The dataset "hf:NAME" or "hf:NAME:SPLIT" (train by default), from the cache or the hub."""
    name, _, split = spec.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise MctfError(f"{spec!r} names no dataset: write hf:NAME or hf:NAME:SPLIT")
    datasets = optional_import("datasets", extra="datasets", purpose="Hugging Face datasets")
    try:
        return datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # network, names, splits and scripts fail with exceptions of different types
        raise MctfError(
            f"the dataset {name!r} cannot be loaded ({first_line(error)}): check its name, split and the network"
        ) from None


class HubReader:
    """One image column of a Hugging Face dataset, and its label column where there is one.

    Columns are recognized by their type (Image, ClassLabel), else by their usual names.
    """

    def __init__(self, dataset: HubDataset, *, source: str, limits: ReadLimits = DEFAULT_LIMITS) -> None:
        self.source = source
        self.dataset = dataset
        self.limits = limits
        self.class_names: list[str] | None = None
        self.classes: list[str] | None = None
        self.unlabeled = ""
        column = _find_column(dataset, "Image", _IMAGE_COLUMNS)
        if column is None:
            raise MctfError(_missing_column(dataset, source, "Image", _IMAGE_COLUMNS))
        self.column = column
        self._encoded = _without_decoding(dataset, column)
        label_column = _find_column(dataset, "ClassLabel", _LABEL_COLUMNS)
        if label_column is None:
            self.unlabeled = _missing_column(dataset, source, "ClassLabel", _LABEL_COLUMNS)
            return
        values = list(dataset[label_column])
        order = getattr(dataset.features[label_column], "names", None)
        if order is None:
            self.class_names = [str(value) for value in values]
            if all(isinstance(value, int) for value in values):
                self.classes = [str(value) for value in sorted(set(values))]
            return
        self.classes = list(order)
        invalid = [value for value in values if not (isinstance(value, int) and 0 <= value < len(order))]
        if invalid:
            self.unlabeled = (
                f"{source} has {plural(len(invalid), 'image')} without a class ({label_column} {invalid[0]}): "
                "use a labeled split"
            )
        else:
            self.class_names = [order[value] for value in values]

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, index: int) -> str:
        return f"image {index}"

    def fingerprint(self, index: int) -> tuple[object, ...]:
        """The fingerprint of the dataset, where it has one, or its length; and the index."""
        return getattr(self.dataset, "_fingerprint", None) or len(self), index

    def read(self, index: int) -> Image.Image:
        return decode_image(lambda: self._value(index), name=f"image {index} of {self.source}", limits=self.limits)

    def _value(self, index: int) -> bytes | Image.Image:
        if self._encoded is not None:
            value = self._encoded[index][self.column]
            if value["bytes"] is not None:
                return value["bytes"]
            if value["path"] is not None and os.path.exists(value["path"]):
                return read_file(Path(value["path"]), self.limits)
        value = self.dataset[index][self.column]
        if not isinstance(value, Image.Image):
            raise UnreadableError(f"it is of type {type(value).__name__}")
        return value

    def empty_classes(self) -> list[str]:
        return []


def _without_decoding(dataset: Any, column: str) -> HubDataset | None:
    """The same rows with encoded images, whose size is checked before they are decoded; None where there are none."""
    feature = dataset.features[column]
    if not hasattr(dataset, "cast_column") or not getattr(feature, "decode", False):
        return None
    try:
        return dataset.cast_column(column, type(feature)(decode=False))
    except Exception:  # a view that cannot be cast: the package decodes, and the size is checked afterwards
        return None


def _find_column(dataset: HubDataset, kind: str, usual: tuple[str, ...]) -> str | None:
    """The only column of that type, else the first with a usual name."""
    typed = [column for column, feature in dataset.features.items() if type(feature).__name__ == kind]
    named = [column for column in usual if column in dataset.features]
    return typed[0] if len(typed) == 1 else named[0] if named else None


def _missing_column(dataset: HubDataset, source: str, kind: str, usual: tuple[str, ...]) -> str:
    columns = ", ".join(dataset.features)
    return f"{source} has the columns {columns}: expected one of type {kind} or named {' or '.join(usual)}"
