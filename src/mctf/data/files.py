"""Where the images lie: a folder or a zip file of `class/name.jpg`, or of `name.jpg` without classes."""

import io
import os
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from PIL import Image, UnidentifiedImageError

from ..errors import MctfError

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_ZIP_BEGINS = b"PK\x03\x04"


class Store(Protocol):
    """Files by name, names having "/" between folders. `folders` are the outermost ones, empty ones too."""

    def members(self) -> list[str]: ...
    def folders(self) -> list[str]: ...
    def read(self, name: str) -> bytes: ...


@dataclass(frozen=True)
class ImageFiles:
    """Images in one place, in the order of their names.

    path: the folder or zip file. names: each image's path below it, with "/" between folders.
    """

    path: Path
    names: tuple[str, ...]
    store: Store

    def __len__(self) -> int:
        return len(self.names)

    @property
    def folders(self) -> tuple[str, ...] | None:
        """The class folder of every image, the outermost one; None where images lie in no folders."""
        if "/" not in self.names[0]:
            return None
        return tuple(name.split("/", 1)[0] for name in self.names)

    def spaced(self, limit: int) -> "ImageFiles":
        """At most `limit` images, evenly spaced over all of them, so that classes keep their share."""
        if limit >= len(self):
            return self
        return replace(self, names=tuple(self.names[index * len(self) // limit] for index in range(limit)))

    def read(self, index: int) -> Image.Image:
        """One image in RGB; raises MctfError with the file's name when it is damaged.

        Orientation tags are not followed: models were not trained so, and published figures are not measured so.
        """
        name = self.names[index]
        try:
            return Image.open(io.BytesIO(self.store.read(name))).convert("RGB")
        except UnidentifiedImageError:
            reason = "no format that Pillow knows"
        except Exception as failure:  # decoders of damaged files raise whatever they trip over
            reason = str(failure) or type(failure).__name__
        raise MctfError(f"{self.path / name} is no readable image ({reason}): repair or remove it")


def find_images(path: Path) -> ImageFiles:
    """All images below a folder or inside a zip file; raises MctfError where there are none to be had."""
    store = _open_store(path)
    members = store.members()
    if not members:
        raise MctfError(f"{path} is empty: expected images, or class folders with images in them")
    names = tuple(sorted(name for name in members if _is_image(name)))
    if not names:
        raise MctfError(f"{path} holds no images: expected files ending in {', '.join(SUFFIXES)}")
    loose = [name for name in names if "/" not in name]
    if loose and len(loose) < len(names):
        raise MctfError(f"{path} holds class folders and loose images ({loose[0]}) side by side: keep one kind there")
    return ImageFiles(path, names, store)


def _is_image(name: str) -> bool:
    """By the suffix, leaving out the hidden twins that some systems put beside files."""
    parts = name.split("/")
    return not any(_is_hidden(part) for part in parts) and name.lower().endswith(SUFFIXES)


def _is_hidden(part: str) -> bool:
    return part == "__MACOSX" or part.startswith(".")


def _open_store(path: Path) -> Store:
    if not path.exists():
        raise MctfError(f"there is no {path}: give a folder or a zip file of images")
    if path.is_dir():
        return Folder(path)
    if zipfile.is_zipfile(path):
        return Archive(path)
    if _begins_as_zip(path):
        raise MctfError(f"{path} is a zip file without its end: it was cut off, so fetch it again")
    raise MctfError(f"{path} is neither a folder nor a readable zip file: give one of these, with images in it")


def _begins_as_zip(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_ZIP_BEGINS)) == _ZIP_BEGINS
    except OSError:
        return False


@dataclass(frozen=True)
class Folder:
    """A folder, links followed."""

    path: Path

    def members(self) -> list[str]:
        return [
            (Path(parent) / file).relative_to(self.path).as_posix()
            for parent, _, files in os.walk(self.path, followlinks=True)
            for file in files
        ]

    def folders(self) -> list[str]:
        return [entry.name for entry in self.path.iterdir() if entry.is_dir() and not _is_hidden(entry.name)]

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()


class Archive:
    """A zip file, read in place.

    It is opened by the process that reads: a handle shared between the workers of a loader has one position for
    all of them, and each would read from where another stopped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: tuple[int, zipfile.ZipFile] | None = None  # the process and its handle

    def members(self) -> list[str]:
        return [name for name in self._archive().namelist() if not name.endswith("/")]

    def folders(self) -> list[str]:
        outermost = {name.split("/", 1)[0] for name in self._archive().namelist() if "/" in name}
        return [name for name in outermost if not _is_hidden(name)]

    def read(self, name: str) -> bytes:
        return self._archive().read(name)

    def _archive(self) -> zipfile.ZipFile:
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                self._opened = os.getpid(), zipfile.ZipFile(self.path)
            except (OSError, zipfile.BadZipFile) as failure:
                raise MctfError(f"{self.path} cannot be read as a zip file ({failure}): fetch it again") from None
        return self._opened[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_opened": None}
