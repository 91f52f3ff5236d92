"""Readers of images: a folder, a zip file, or a dataset of the Hugging Face hub, all behind one interface.

timm's readers do not fit here: `ReaderImageFolder` takes the innermost folder as the class, orders names naturally and
reads the hidden copies that macOS writes; `ReaderHfds` needs the names of the columns and refuses slices of a split.
"""

import os
import stat
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from .._utils import first_line
from ..errors import MctfError
from .decode import DEFAULT_LIMITS, ReadLimits, UnreadableError, decode_image, describe_kind, read_bounded, read_file
from .hub_reader import HUB_PREFIX, HubReader, load_hub_dataset

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_ZIP_MAGIC = b"PK\x03\x04"
_OTHER_ARCHIVES = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"7z\xbc\xaf": "7z",
    b"Rar!": "RAR",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
_BOUNDED_COMPRESSION = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_UNBOUNDED_STEP = 4096  # bytes read at a time where zipfile unpacks all that it has read at once


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


def open_reader(source: str, limits: ReadLimits = DEFAULT_LIMITS) -> ImageReader:
    """The reader of a folder, a zip file, or "hf:NAME[:SPLIT]"; raises MctfError with the cure."""
    if source.startswith(HUB_PREFIX):
        return HubReader(load_hub_dataset(source), source=source.removeprefix(HUB_PREFIX), limits=limits)
    path = Path(source)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return FolderReader(path, limits)
        kind = describe_kind(mode)
        if kind is not None:
            raise MctfError(f"{path} is {kind}, not a regular file: give a folder or a zip file of images")
        with path.open("rb") as file:
            start = file.read(_TAR_MAGIC_AT + len(_TAR_MAGIC))
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        if isinstance(error, MctfError):
            raise
        raise MctfError(f"there is no {path}: give a folder or a zip file of images, or a dataset as hf:NAME") from None
    except OSError as error:
        raise MctfError(f"{path} cannot be opened ({error.strerror}): give a folder or a zip file of images") from None
    if _is_zip(path):
        return ZipReader(path, limits)
    if start.startswith(_ZIP_MAGIC):
        raise MctfError(f"{path} is a truncated zip file: download it again")
    other = next((name for magic, name in _OTHER_ARCHIVES.items() if start.startswith(magic)), None)
    if start[_TAR_MAGIC_AT:] == _TAR_MAGIC:
        other = "tar"
    if other is not None:
        raise MctfError(f"{path} is a {other} archive: unpack it, or pack the images into a zip file")
    raise MctfError(f"{path} is neither a folder nor a readable zip file: give one of these, with images in it")


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except Exception:  # of a damaged directory; `ZipReader` says which
        return True


class FileReader(ABC):
    """Image files named `class/name.jpg`, or `name.jpg` without classes, in the order of their names.

    The outermost folder is the class. Orientation tags are ignored, as in training and in published results.
    labeled: False where nobody asks for classes: any nesting will do.
    """

    classes: list[str] | None = None

    def __init__(self, path: Path, limits: ReadLimits = DEFAULT_LIMITS, *, labeled: bool = True) -> None:
        self.source = str(path)
        self.path = path
        self.limits = limits
        files = self._files()
        if not files:
            raise MctfError(f"{path} is empty: expected images, or class folders with images in them")
        self.names = sorted(name for name in files if is_image_name(name))
        if not self.names:
            raise MctfError(f"{path} holds no images: expected files ending in {', '.join(IMAGE_SUFFIXES)}")
        loose = [name for name in self.names if "/" not in name]
        if labeled and loose and len(loose) < len(self.names):
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
    def _bytes(self, name: str) -> bytes:
        """The content of a file within the limits; raises exceptions of any type."""

    @abstractmethod
    def fingerprint(self, index: int) -> tuple[object, ...]: ...

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def read(self, index: int) -> Image.Image:
        return decode_image(lambda: self.content(index), name=str(self.path / self.names[index]), limits=self.limits)

    def content(self, index: int) -> bytes:
        """One encoded image; raises exceptions of any type."""
        return self._bytes(self.names[index])

    def empty_classes(self) -> list[str]:
        return sorted({name for name in self._folders() if not _hidden(name)} - set(self.class_names or ()))


class FolderReader(FileReader):
    """A folder; symbolic links are followed.

    A link to a folder that it lies in is not followed again. Two other links to one folder are refused, since its
    images would count twice. Several links to one file are several images.
    """

    def _files(self) -> list[str]:
        return list(walk_files(self.path))

    def _folders(self) -> list[str]:
        with os.scandir(self.path) as entries:
            return [entry.name for entry in entries if _is_folder(entry)]

    def _bytes(self, name: str) -> bytes:
        return read_file(self.path / name, self.limits)

    def fingerprint(self, index: int) -> tuple[object, ...]:
        """Name and size in bytes, None for a file that cannot be found."""
        name = self.names[index]
        try:
            return name, (self.path / name).stat().st_size
        except OSError:
            return name, None


def walk_files(root: Path) -> Iterator[str]:
    """Paths of all files below a folder, with "/" between folders: its files by name, then its folders by name."""
    seen: dict[tuple[int, int], str] = {}  # device and inode: the path below the root
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            status = os.stat(root / folder)
            first = seen.setdefault((status.st_dev, status.st_ino), folder)
            if first != folder:
                if not first or folder.startswith(first + "/"):
                    continue
                raise MctfError(
                    f"{root / first} and {root / folder} are one folder, whose images would count "
                    "twice: remove one of the links"
                )
            with os.scandir(root / folder) as entries:
                kinds = sorted((entry.name, _is_folder(entry)) for entry in entries)
        except OSError as error:
            raise MctfError(
                f"{root / folder} cannot be read ({error.strerror}): make it readable, or remove it"
            ) from None
        prefix = f"{folder}/" if folder else ""
        yield from (prefix + name for name, is_folder in kinds if not is_folder)
        pending += [prefix + name for name, is_folder in reversed(kinds) if is_folder and not _hidden(name)]


def is_image_name(name: str) -> bool:
    """Whether a path with "/" between folders is that of an image, by its ending, and is not hidden."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not is_hidden(name)


def is_hidden(name: str) -> bool:
    """Whether a file, or a folder above it, is hidden, by its path with "/" between folders."""
    return any(map(_hidden, name.split("/")))


class ZipReader(FileReader):
    """A zip file, read in place.

    Each process opens it for itself: loader workers that share a file handle share its position, too. Of several
    entries with one name the last counts, as it does when the file is unpacked. Names are taken as unpacking takes
    them: without a leading "/" or "./", and with "\\" as the separator where there is no "/".
    """

    def __init__(self, path: Path, limits: ReadLimits = DEFAULT_LIMITS, *, labeled: bool = True) -> None:
        self._handle: tuple[int, zipfile.ZipFile] | None = None  # process id and its handle
        self._renamed: dict[str, str] = {}  # the name in the zip file, where it is another one
        super().__init__(path, limits, labeled=labeled)

    def _files(self) -> list[str]:
        names: dict[str, None] = {}
        for member in self._archive().namelist():
            parts = _parts_of(member)
            if ".." in parts:
                raise MctfError(f"{self.path} holds {member!r}, which lies outside of it: pack the images again")
            if not parts[-1]:  # a folder
                continue
            name = "/".join(parts)
            names[name] = None
            self._renamed.pop(name, None)
            if name != member:
                self._renamed[name] = member
        return list(names)

    def _folders(self) -> list[str]:
        return list({parts[0] for parts in map(_parts_of, self._archive().namelist()) if len(parts) > 1})

    def _bytes(self, name: str) -> bytes:
        archive, entry = self._archive(), self._entry(name)
        self.limits.check_bytes(entry.file_size)
        if entry.flag_bits & 1:
            raise UnreadableError("it is encrypted", "unpack the zip file, and pack it without a password")
        step = {} if entry.compress_type in _BOUNDED_COMPRESSION else {"step": _UNBOUNDED_STEP}
        with archive.open(entry) as file:
            return read_bounded(file, self.limits, **step)

    def fingerprint(self, index: int) -> tuple[object, ...]:
        """Name, size in bytes and checksum, from the directory of the zip file."""
        name = self.names[index]
        entry = self._entry(name)
        return name, entry.file_size, entry.CRC

    def _entry(self, name: str) -> zipfile.ZipInfo:
        return self._archive().getinfo(self._renamed.get(name, name))

    def _archive(self) -> zipfile.ZipFile:
        if self._handle is None or self._handle[0] != os.getpid():
            try:
                self._handle = os.getpid(), zipfile.ZipFile(self.path)
            except Exception as error:  # a damaged directory raises exceptions of many types
                raise MctfError(
                    f"{self.path} cannot be read as a zip file ({first_line(error)}): download it again"
                ) from None
        return self._handle[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handle": None}


def _parts_of(member: str) -> list[str]:
    """Folders and name of an entry of a zip file; the name is empty for a folder."""
    *folders, name = member.split("/" if "/" in member else "\\")
    return [*(part for part in folders if part not in ("", ".")), name]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one; a link that leads nowhere is a file, which cannot be read."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _hidden(part: str) -> bool:
    """Hidden files and folders, and the copies that macOS writes beside files."""
    return part == "__MACOSX" or part.startswith(".")
