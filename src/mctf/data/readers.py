"""Readers of images: a folder, a zip file, or a dataset of the Hugging Face hub, all behind one interface.

timm's readers do not fit here: `ReaderImageFolder` takes the innermost folder as the class, orders names naturally and
reads the hidden copies that macOS writes; `ReaderHfds` needs the names of the columns and refuses slices of a split.
"""

import io
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from PIL import Image, UnidentifiedImageError

from .._utils import first_line, optional_import
from ..errors import MctfError

HUB_PREFIX = "hf:"
IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_ZIP_MAGIC = b"PK\x03\x04"
_IMAGE_COLUMNS = ("image", "img", "pixel_values")
_LABEL_COLUMNS = ("label", "labels", "fine_label", "class")


class ImageReader(Protocol):
    """Images of one source by index.

    source: its name in messages. class_names: the class of every image; None for unlabeled images, with the reason in
    `unlabeled`. classes: all classes in the dataset's own order; None where it has no order.
    empty_classes: class folders without images.
    """

    source: str
    class_names: list[str] | None
    unlabeled: str
    classes: list[str] | None

    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...

    def fingerprint(self, index: int) -> tuple[object, ...]:
        """What is known of an image without reading it; another image in its place is likely to differ in this."""
        ...

    def read(self, index: int) -> Image.Image:
        """One image in RGB; raises MctfError with its name when it is damaged."""
        ...

    def empty_classes(self) -> list[str]: ...


def open_reader(source: str) -> ImageReader:
    """The reader of a folder, a zip file, or "hf:NAME[:SPLIT]"; raises MctfError with the cure."""
    if source.startswith(HUB_PREFIX):
        return HubReader(load_hub_dataset(source), source=source.removeprefix(HUB_PREFIX))
    path = Path(source)
    if not path.exists():
        raise MctfError(f"there is no {path}: give a folder or a zip file of images, or a dataset as hf:NAME")
    if path.is_dir():
        return FolderReader(path)
    if zipfile.is_zipfile(path):
        return ZipReader(path)
    with path.open("rb") as file:
        truncated = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    if truncated:
        raise MctfError(f"{path} is a truncated zip file: download it again")
    raise MctfError(f"{path} is neither a folder nor a readable zip file: give one of these, with images in it")


class FileReader(ABC):
    """Image files named `class/name.jpg`, or `name.jpg` without classes, in the order of their names.

    The outermost folder is the class. Orientation tags are ignored, as in training and in published results.
    """

    classes: list[str] | None = None

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        self.path = path
        files = self._files()
        if not files:
            raise MctfError(f"{path} is empty: expected images, or class folders with images in them")
        self.names = sorted(
            name for name in files if name.lower().endswith(IMAGE_SUFFIXES) and not any(map(_hidden, name.split("/")))
        )
        if not self.names:
            raise MctfError(f"{path} holds no images: expected files ending in {', '.join(IMAGE_SUFFIXES)}")
        loose = [name for name in self.names if "/" not in name]
        if loose and len(loose) < len(self.names):
            raise MctfError(f"{path} holds class folders and loose images ({loose[0]}) side by side: keep one kind")
        self.class_names: list[str] | None = None if loose else [name.split("/", 1)[0] for name in self.names]
        self.unlabeled = f"the images of {path} are in no class folders (class/name.jpg)" if loose else ""

    @abstractmethod
    def _files(self) -> list[str]:
        """Paths of all files, with "/" between folders."""

    @abstractmethod
    def _folders(self) -> list[str]:
        """The outermost folders, empty ones included."""

    @abstractmethod
    def _bytes(self, name: str) -> bytes: ...

    @abstractmethod
    def fingerprint(self, index: int) -> tuple[object, ...]: ...

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def read(self, index: int) -> Image.Image:
        name = self.names[index]
        try:
            return Image.open(io.BytesIO(self._bytes(name))).convert("RGB")
        except UnidentifiedImageError:
            reason = "unknown image format"
        except Exception as error:  # decoders raise exceptions of any type on damaged files
            reason = first_line(error)
        raise MctfError(f"{self.path / name} is not a readable image ({reason}): repair or remove it")

    def empty_classes(self) -> list[str]:
        return sorted({name for name in self._folders() if not _hidden(name)} - set(self.class_names or ()))


class FolderReader(FileReader):
    """A folder; symbolic links are followed."""

    def _files(self) -> list[str]:
        return [
            (Path(parent) / file).relative_to(self.path).as_posix()
            for parent, _, files in os.walk(self.path, followlinks=True)
            for file in files
        ]

    def _folders(self) -> list[str]:
        return [entry.name for entry in self.path.iterdir() if entry.is_dir()]

    def _bytes(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def fingerprint(self, index: int) -> tuple[object, ...]:
        """Name and size in bytes, None for a file that cannot be found."""
        name = self.names[index]
        try:
            return name, (self.path / name).stat().st_size
        except OSError:
            return name, None


class ZipReader(FileReader):
    """A zip file, read in place.

    Each process opens it for itself: loader workers that share a file handle share its position, too.
    """

    def __init__(self, path: Path) -> None:
        self._handle: tuple[int, zipfile.ZipFile] | None = None  # process id and its handle
        super().__init__(path)

    def _files(self) -> list[str]:
        return [name for name in self._archive().namelist() if not name.endswith("/")]

    def _folders(self) -> list[str]:
        return list({name.split("/", 1)[0] for name in self._archive().namelist() if "/" in name})

    def _bytes(self, name: str) -> bytes:
        return self._archive().read(name)

    def fingerprint(self, index: int) -> tuple[object, ...]:
        """Name, size in bytes and checksum, from the directory of the zip file."""
        name = self.names[index]
        entry = self._archive().getinfo(name)
        return name, entry.file_size, entry.CRC

    def _archive(self) -> zipfile.ZipFile:
        if self._handle is None or self._handle[0] != os.getpid():
            try:
                self._handle = os.getpid(), zipfile.ZipFile(self.path)
            except (OSError, zipfile.BadZipFile) as error:
                raise MctfError(f"{self.path} cannot be read as a zip file ({error}): download it again") from None
        return self._handle[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handle": None}


def _hidden(part: str) -> bool:
    """Hidden files and folders, and the copies that macOS writes beside files."""
    return part == "__MACOSX" or part.startswith(".")


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

    def __init__(self, dataset: HubDataset, *, source: str) -> None:
        self.source = source
        self.dataset = dataset
        self.class_names: list[str] | None = None
        self.classes: list[str] | None = None
        self.unlabeled = ""
        column = _find_column(dataset, "Image", _IMAGE_COLUMNS)
        if column is None:
            raise MctfError(_missing_column(dataset, source, "Image", _IMAGE_COLUMNS))
        self.column = column
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
                f"{source} has {len(invalid)} images without a class ({label_column} {invalid[0]}): use a labeled split"
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
        try:
            return self.dataset[index][self.column].convert("RGB")
        except Exception as error:  # decoders raise exceptions of any type on damaged files
            reason = first_line(error)
        raise MctfError(f"image {index} of {self.source} is not readable ({reason}): repair or remove it")

    def empty_classes(self) -> list[str]:
        return []


def _find_column(dataset: HubDataset, kind: str, usual: tuple[str, ...]) -> str | None:
    """The only column of that type, else the first with a usual name."""
    typed = [column for column, feature in dataset.features.items() if type(feature).__name__ == kind]
    named = [column for column in usual if column in dataset.features]
    return typed[0] if len(typed) == 1 else named[0] if named else None


def _missing_column(dataset: HubDataset, source: str, kind: str, usual: tuple[str, ...]) -> str:
    columns = ", ".join(dataset.features)
    return f"{source} has the columns {columns}: expected one of type {kind} or named {' or '.join(usual)}"
