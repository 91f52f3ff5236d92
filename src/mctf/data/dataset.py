"""One dataset for evaluation and training: images of folders, zip files and the Hugging Face hub, and their classes."""

import hashlib
import os
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ..errors import MctfError
from .decode import DEFAULT_LIMITS, ReadLimits
from .labels import encode_targets, number_classes, number_for_model, read_class_table
from .readers import ImageReader, open_reader

Source = Path | str | Sequence[Path | str]

_SPLITS = {"train", "training", "val", "valid", "validation", "test"}
_MAX_CONSECUTIVE_FAILURES = 100  # more unreadable images in a row than chance gives: the source is damaged
_MAX_WARNINGS = 5
SKIP_HINT = "skip unreadable images (--on-corrupt skip)"


class SkippedImageWarning(UserWarning):
    """An unreadable image is left out."""


@dataclass(frozen=True)
class ReadFailure:
    """An unreadable image: its index and the error message."""

    index: int
    reason: str


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Images by index, in the order of their sources and names, with class indices where classes are determined.

    source: in messages. class_names: class per image. class_to_idx: index by class name. targets: N, int64.
    The last three are None for unlabeled images; targets and class_to_idx also where the classes of a model are not
    determined. unlabeled: why images have no class names. notes: for the user.
    """

    source: str
    readers: tuple[ImageReader, ...]
    rows: Sequence[int]  # of the concatenated readers
    class_names: Sequence[str] | None
    class_to_idx: dict[str, int] | None = None
    targets: Tensor | None = None
    unlabeled: str = ""
    notes: tuple[str, ...] = ()
    table: Path | None = None
    _ends: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", list(accumulate(len(reader) for reader in self.readers)))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def classes(self) -> list[str]:
        """Class names by index; empty where classes are not determined."""
        return sorted(self.class_to_idx or {}, key=(self.class_to_idx or {}).__getitem__)

    @property
    def num_classes(self) -> int:
        return max((self.class_to_idx or {}).values(), default=-1) + 1

    @property
    def names(self) -> list[str]:
        """One per image: the path below its folder or zip file."""
        return [reader.name(index) for reader, index in map(self._locate, range(len(self)))]

    def digest(self) -> str:
        """A checksum over all images and labels in order, without reading an image.

        It covers names and labels, and the size (folder), size and CRC (zip file) or fingerprint (hub) of the images.
        Where the sources are has no part in it.
        """
        checksum = hashlib.blake2b(digest_size=16)
        labels = [None] * len(self) if self.targets is None else self.targets.tolist()
        for label, (reader, number) in zip(labels, map(self._locate, range(len(self))), strict=True):
            checksum.update(repr((label, *reader.fingerprint(number))).encode())
        return checksum.hexdigest()

    def read(self, index: int) -> Image.Image:
        """One image in RGB; raises MctfError with its name when it is damaged."""
        reader, number = self._locate(index)
        return reader.read(number)

    def _locate(self, index: int) -> tuple[ImageReader, int]:
        row = self.rows[index]
        number = bisect_right(self._ends, row)
        return self.readers[number], row - (self._ends[number - 1] if number else 0)

    def read_or_next(self, index: int, *, skip: bool = True) -> tuple[Image.Image, int, list[ReadFailure]]:
        """The image at `index`, or the next readable one; its index; the unreadable images before it.

        The choice depends on the images alone, so it is the same in every epoch, rank and resumed run.
        skip: if False, an unreadable image raises MctfError.
        """
        failures: list[ReadFailure] = []
        for offset in range(min(len(self), _MAX_CONSECUTIVE_FAILURES)):
            candidate = (index + offset) % len(self)
            try:
                return self.read(candidate), candidate, failures
            except MctfError as error:
                if not skip:
                    raise MctfError(f"{error}, or {SKIP_HINT}") from None
                failures.append(ReadFailure(candidate, str(error)))
        if len(failures) == len(self):
            raise none_readable(len(self), failures[0])
        raise MctfError(f"{len(failures)} images in a row are unreadable, the first: {failures[0].reason}")

    def readable(self, *, skip: bool) -> Iterator[tuple[int, Image.Image]]:
        """Index and image of all readable images in order; raises MctfError if there are none.

        skip: if False, an unreadable image raises MctfError.
        """
        found, failure = False, None
        for index in range(len(self)):
            try:
                image = self.read(index)
            except MctfError as error:
                if not skip:
                    raise MctfError(f"{error}, or {SKIP_HINT}") from None
                failure = failure or ReadFailure(index, str(error))
                continue
            found = True
            yield index, image
        if failure is not None and not found:
            raise none_readable(len(self), failure)

    def subset(self, indices: Sequence[int]) -> "ImageDataset":
        """These images, with the classes that they have in the whole dataset."""
        names, targets = self.class_names, self.targets
        return replace(
            self,
            rows=[self.rows[index] for index in indices],
            class_names=None if names is None else [names[index] for index in indices],
            targets=None if targets is None else targets[torch.tensor(indices)],
        )

    def spaced(self, limit: int) -> "ImageDataset":
        """At most `limit` images, evenly spaced, so that classes keep their proportions."""
        if limit >= len(self):
            return self
        return self.subset([index * len(self) // limit for index in range(limit)])

    def shard(self, rank: int, world_size: int) -> "ImageDataset":
        """Every `world_size`-th image from `rank` on: shards are disjoint and cover the dataset."""
        if len(self) < world_size:
            raise MctfError(f"{self.source} holds fewer images than the {world_size} processes: start fewer processes")
        return self if world_size == 1 else self.subset(range(rank, len(self), world_size))

    def for_model(self, num_classes: int, *, classes: Path | None = None) -> "ImageDataset":
        """The same images with the class indices of a model; without any, and with a note, where they are unknown.

        classes: a TSV file of index, class and name; see `labels.number_for_model` for the rules without it.
        """
        class_to_idx, notes = None, self.notes
        if classes is not None:
            read_class_table(classes, num_classes=num_classes)  # a malformed table is an error in any case
        if num_classes and self.class_names is not None:
            class_to_idx, notes = number_for_model(
                self.class_names, num_classes=num_classes, table=classes, order=_own_order(self.readers)
            )
        elif num_classes:
            notes = (f"accuracy is unknown: {self.unlabeled}",)
        unnumbered = replace(self, class_to_idx=None, targets=None, notes=notes, table=classes)
        return unnumbered if class_to_idx is None else unnumbered.numbered(class_to_idx)

    def numbered(self, class_to_idx: Mapping[str, int], *, cure: str | None = None) -> "ImageDataset":
        """The same images with these class indices; raises MctfError for a class that has none."""
        if self.class_names is None:
            return replace(self, notes=(f"accuracy is unknown: {self.unlabeled}",))
        cure = cure or f"is not in {self.table or 'the dataset'}: add a line for it there"
        targets = encode_targets(self.class_names, class_to_idx, source=self.source, cure=cure)
        return replace(self, class_to_idx=dict(class_to_idx), targets=targets)

    def check_trainable(self) -> "ImageDataset":
        """Itself; raises MctfError where it would train on other classes than the user meant."""
        if self.class_names is None or self.class_to_idx is None:
            raise MctfError(f"training needs labels, but {self.unlabeled}")
        present = set(self.class_names)
        for reader in self.readers:
            empty = [name for name in reader.empty_classes() if name not in present]
            if empty:
                raise MctfError(f"class folder {empty[0]!r} of {reader.source} holds no images: fill it or remove it")
        if present <= _SPLITS:
            raise MctfError(f"the classes of {self.source} are {', '.join(sorted(present))}: give one split's folder")
        absent = sorted(self.class_to_idx.keys() - present)
        if absent:
            raise MctfError(
                f"{self.source} holds no images of class {absent[0]!r} ({len(absent)} of {len(self.class_to_idx)} "
                f"classes have none): add them, or remove the class from {self.table or 'the dataset'}"
            )
        if len(present) == 1:
            raise MctfError(
                f"all images of {self.source} are of one class, {present.pop()!r}: training needs two classes or more, "
                "each in an outermost folder"
            )
        gaps = sorted(set(range(self.num_classes)) - set(self.class_to_idx.values()))
        if gaps:
            raise MctfError(f"{self.table} has no folder for class {gaps[0]}: number the classes from 0 without gaps")
        return self


def open_dataset(
    source: Source,
    *,
    classes: Path | None = None,
    class_to_idx: Mapping[str, int] | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> ImageDataset:
    """The images of a folder, of one or several zip files, or of "hf:NAME[:SPLIT]"; several in a list or with commas.

    classes: a TSV file of index, class and name. class_to_idx: the class indices of a trained model; a class that it
    lacks is refused. Without both, classes have the dataset's own order (hub) or the order of their names.
    Folders of the same name in several sources are one class. limits: images beyond them are unreadable.
    """
    parts = _split_sources(source)
    if not parts or not all(parts):
        raise MctfError(
            "no images are given: a name in --data is empty, as by an unset shell variable; name a folder, zip files, "
            "or a dataset as hf:NAME"
        )
    readers = tuple(open_reader(part, limits) for part in parts)
    unlabeled = next((reader.unlabeled for reader in readers if reader.class_names is None), "")
    names = None if unlabeled else [name for reader in readers for name in reader.class_names or ()]
    rows = range(sum(len(reader) for reader in readers))
    dataset = ImageDataset(", ".join(parts), readers, rows, names, unlabeled=unlabeled, table=classes)
    if class_to_idx is not None:
        return dataset.numbered(class_to_idx, cure="is not among the classes of training: remove it")
    if classes is not None:
        return dataset.numbered(read_class_table(classes))
    return dataset if names is None else dataset.numbered(number_classes(names, order=_own_order(readers)))


def none_readable(count: int, first: ReadFailure) -> MctfError:
    """The error of a source whose images are all unreadable."""
    return MctfError(first.reason if count == 1 else f"none of {count} images is readable, the first: {first.reason}")


def _split_sources(source: Source) -> list[str]:
    if not isinstance(source, (str, Path)):
        return [part for each in source for part in _split_sources(each)]
    text = str(source)
    if text.strip() and os.path.exists(text):  # a comma may be part of a name
        return [text]
    return [part.strip() for part in text.split(",")]


def _own_order(readers: Sequence[ImageReader]) -> Sequence[str] | None:
    """The classes in the order that all readers agree on, if they have one."""
    first = readers[0].classes
    return first if all(reader.classes == first for reader in readers) else None


class SkippedImages:
    """Counts the unreadable images so far and warns about the first few."""

    def __init__(self) -> None:
        self._indices: set[int] = set()

    def __len__(self) -> int:
        return len(self._indices)

    def add(self, failures: Iterable[ReadFailure]) -> None:
        for failure in failures:
            if failure.index in self._indices:
                continue
            self._indices.add(failure.index)
            if len(self) <= _MAX_WARNINGS:
                warnings.warn(f"skipped: {failure.reason}", SkippedImageWarning, stacklevel=2)
            elif len(self) == _MAX_WARNINGS + 1:
                further = "further unreadable images are skipped and counted without a warning"
                warnings.warn(further, SkippedImageWarning, stacklevel=2)
