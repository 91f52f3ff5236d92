"""Labelled images for training, from folders and zip files together, and what becomes of unreadable ones."""

import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..distributed import DistributedContext
from ..errors import MctfError
from .files import ImageFiles, find_images
from .labels import Labels, number_classes
from .transforms import Transform

_SPLITS = {"train", "training", "val", "valid", "validation", "test"}
_MOST_IN_A_ROW = 100  # unreadable neighbours after which the whole place is taken for lost
_MOST_WARNINGS = 5


class Source(Protocol):
    """Images by number; `read` gives RGB or raises MctfError with the image's name."""

    def __len__(self) -> int: ...
    def read(self, index: int) -> Image.Image: ...


@dataclass(frozen=True)
class Failure:
    """An image that could not be read, and what was said about it."""

    index: int
    reason: str


@dataclass(frozen=True)
class Examples:
    """Images and their classes.

    labels: one an image, int64, from 0 to classes - 1; every class has images. known: index of each class by name.
    """

    source: Source
    labels: Tensor
    known: dict[str, int]

    @property
    def classes(self) -> int:
        return max(self.known.values()) + 1

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int, *, skip: bool = True) -> tuple[Image.Image, int, list[Failure]]:
        """The image at `index`, or the next readable one after it; its own index; the unreadable ones between.

        The rule knows nothing but the files, so every epoch, process and resumed run puts the same image there.
        """
        failures: list[Failure] = []
        for offset in range(min(len(self), _MOST_IN_A_ROW)):
            place = (index + offset) % len(self)
            try:
                return self.source.read(place), place, failures
            except MctfError as error:
                if not skip:
                    raise MctfError(f"{error}, or skip such images (on_corrupt = skip)") from None
                failures.append(Failure(place, str(error)))
        raise MctfError(f"{len(failures)} images in a row are unreadable, the first being: {failures[0].reason}")


@dataclass(frozen=True)
class JoinedFiles:
    """Several folders and zip files, one after the other."""

    parts: tuple[ImageFiles, ...]
    ends: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", tuple(accumulate(len(part) for part in self.parts)))

    def __len__(self) -> int:
        return self.ends[-1]

    def read(self, index: int) -> Image.Image:
        number = bisect_right(self.ends, index)
        return self.parts[number].read(index - (self.ends[number - 1] if number else 0))


class Unreadable:
    """The unreadable images met so far, with a warning for each of the first few."""

    def __init__(self) -> None:
        self._indices: set[int] = set()

    def __len__(self) -> int:
        return len(self._indices)

    def add(self, failures: Iterable[Failure]) -> None:
        for failure in failures:
            if failure.index in self._indices:
                continue
            self._indices.add(failure.index)
            if len(self) <= _MOST_WARNINGS:
                warnings.warn(f"skipped: {failure.reason}", stacklevel=2)
            elif len(self) == _MOST_WARNINGS + 1:
                warnings.warn("more unreadable images are skipped; they are only counted from here on", stacklevel=2)


def find_examples(paths: Sequence[Path], *, table: Path | None = None) -> Examples:
    """All images of these folders and zip files; class folders of the same name are one class.

    table: a TSV file of index, folder and name; without one, classes are numbered in the order of their names.
    """
    if not paths:
        raise MctfError("there is no training data: name a folder, zip files, or a dataset as hf:NAME")
    parts = tuple(find_images(path) for path in paths)
    folders = [folder for part in parts for folder in _class_folders(part)]
    _check_folders(parts, set(folders))
    place = ", ".join(str(path) for path in paths)
    return Examples(JoinedFiles(parts), *number_classes(folders, place=place, table=table))


def _class_folders(images: ImageFiles) -> tuple[str, ...]:
    if images.folders is None:
        raise MctfError(f"the images of {images.path} lie in no class folders: training needs them as class/name.jpg")
    return images.folders


def _check_folders(parts: Sequence[ImageFiles], filled: set[str]) -> None:
    """Refuses what would train, but not on the classes that were meant."""
    for part in parts:
        empty = sorted(set(part.store.folders()) - filled)
        if empty:
            raise MctfError(f"class folder {empty[0]!r} of {part.path} holds no images: fill it or remove it")
    name = next(iter(filled))
    if filled <= _SPLITS:
        raise MctfError(f"{parts[0].path} holds {', '.join(sorted(filled))} for classes: give the folder of one split")
    if len(filled) == 1:
        raise MctfError(
            f"all images of {parts[0].path} lie in one folder, {name!r}: training needs two classes or more, "
            "each in a folder at the top"
        )


# MERGED from mctf.data.dataset:
# Training images from Hugging Face `datasets`.

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


# MERGED from mctf.data.dataset:
# Preprocessed images in batches, read by worker processes where asked.
#
# Axes: B images, 3 H W.


@dataclass(frozen=True)
class Batch:
    """pixels: B 3 H W, ready for the model. labels: B, int64, None where classes are unknown."""

    pixels: Tensor
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.pixels)


@dataclass(frozen=True)
class Batches:
    """All images in order, `batch_size` at a time; can be iterated again and again.

    workers: processes that read ahead; 0 reads in this one, between the batches.
    """

    images: ImageFiles
    labels: Labels
    transform: Transform
    batch_size: int = 32
    workers: int = 0

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        samples = _Samples(self.images, self.transform)
        loader = DataLoader(samples, self.batch_size, num_workers=self.workers, collate_fn=_stack)
        known = None if self.labels.indices is None else torch.tensor(self.labels.indices)
        start = 0
        for pixels in loader:
            if isinstance(pixels, MctfError):
                raise pixels
            stop = start + len(pixels)
            yield Batch(pixels, None if known is None else known[start:stop])
            start = stop


class _Samples(Dataset[Tensor | MctfError]):
    """One preprocessed image, 3 H W, or the error it gave.

    Errors travel as values: one raised in a worker arrives with its whole traceback for a message.
    """

    def __init__(self, images: ImageFiles, transform: Transform) -> None:
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor | MctfError:
        try:
            return self.transform(self.images.read(index))
        except MctfError as error:
            return error


def _stack(samples: Sequence[Tensor | MctfError]) -> Tensor | MctfError:
    tensors = []
    for sample in samples:
        if isinstance(sample, MctfError):
            return sample
        tensors.append(sample)
    return torch.stack(tensors)


# MERGED from mctf.data.files:
# Some of the images with their labels: a few of them evenly spaced, or those of one process.


def spaced(images: ImageFiles, labels: Labels, limit: int) -> tuple[ImageFiles, Labels]:
    """At most `limit` images with the labels they have among all: a few images may be of a few classes only."""
    chosen = images.spaced(limit)
    if labels.indices is None:
        return chosen, labels
    known = dict(zip(images.names, labels.indices, strict=True))
    return chosen, replace(labels, indices=tuple(known[name] for name in chosen.names))


def share(images: ImageFiles, labels: Labels, processes: DistributedContext) -> tuple[ImageFiles, Labels]:
    """Every `world`-th image from `rank` on with its label; no image is left out or counted twice."""
    if len(images) < processes.world:
        raise MctfError(f"{images.path} holds fewer images than the {processes.world} processes: start fewer of them")
    own = slice(processes.rank, None, processes.world)
    indices = None if labels.indices is None else labels.indices[own]
    return replace(images, names=images.names[own]), replace(labels, indices=indices)
