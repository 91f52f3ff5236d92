"""Labelled images for training, from folders and zip files together, and what becomes of unreadable ones."""

import warnings
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from PIL import Image
from torch import Tensor

from ..errors import MctfError
from .classes import number_classes
from .files import ImageFiles, find_images

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
