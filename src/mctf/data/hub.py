"""Training images from Hugging Face `datasets`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from ..errors import MctfError
from .classes import number_classes
from .examples import Examples

PREFIX = "hf:"
_IMAGE_NAMES = ("image", "img", "pixel_values")
_LABEL_NAMES = ("label", "labels", "fine_label", "class")


class HubDataset(Protocol):
    """What is used of `datasets.Dataset`: rows by number, columns by name, and the type of every column."""

    features: Mapping[str, Any]

    def __len__(self) -> int: ...
    def __getitem__(self, key: Any) -> Any: ...


@dataclass(frozen=True)
class HubImages:
    """The images of one column."""

    name: str
    dataset: HubDataset
    column: str

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> Image.Image:
        try:
            return self.dataset[index][self.column].convert("RGB")
        except Exception as failure:  # decoders of damaged files raise whatever they trip over
            reason = str(failure) or type(failure).__name__
        raise MctfError(f"image {index} of {self.name} is unreadable ({reason}): repair or remove it")


def load_hub(spec: str) -> HubDataset:
    """The dataset "hf:NAME" or "hf:NAME:SPLIT" (train by default), from the cache or the hub."""
    name, _, split = spec.removeprefix(PREFIX).partition(":")
    if not name:
        raise MctfError(f"{spec!r} names no dataset: write hf:NAME or hf:NAME:SPLIT")
    try:
        import datasets
    except ImportError:
        raise MctfError("Hugging Face datasets need a package more: run pip install 'mctf[datasets]'") from None
    try:
        return datasets.load_dataset(name, split=split or "train")
    except Exception as failure:  # network, names, splits and scripts each fail with types of their own
        reason = (str(failure) or type(failure).__name__).splitlines()[0]
        raise MctfError(
            f"the dataset {name!r} cannot be loaded ({reason}): check its name, split and the network"
        ) from None


def hub_examples(dataset: HubDataset, *, name: str, table: Path | None = None) -> Examples:
    """Images and classes of a dataset. Classes are in its own order, or in that of the table."""
    images = _find_column(dataset, name, kind="Image", names=_IMAGE_NAMES)
    column = _find_column(dataset, name, kind="ClassLabel", names=_LABEL_NAMES)
    values = list(dataset[column])
    order = getattr(dataset.features[column], "names", None)
    if order is not None:
        unknown = [value for value in values if not (isinstance(value, int) and 0 <= value < len(order))]
        if unknown:
            raise MctfError(
                f"{name} has {len(unknown)} images without a class ({column} {unknown[0]}): use a labelled split"
            )
        values = [order[value] for value in values]
    elif all(isinstance(value, int) for value in values):
        order = [str(value) for value in sorted(set(values))]
    labels, known = number_classes([str(value) for value in values], place=name, table=table, order=order)
    return Examples(HubImages(name, dataset, images), labels, known)


def _find_column(dataset: HubDataset, name: str, *, kind: str, names: tuple[str, ...]) -> str:
    """The only column of that type, or the first of the usual names."""
    typed = [column for column, feature in dataset.features.items() if type(feature).__name__ == kind]
    usual = [column for column in names if column in dataset.features]
    if len(typed) == 1:
        return typed[0]
    if usual:
        return usual[0]
    columns = ", ".join(dataset.features)
    raise MctfError(f"{name} has the columns {columns}: expected one of type {kind} or named {' or '.join(names)}")
