"""Images to embed, as a stream: folders, zip files, tar shards, parquet, text files of paths, the hub, fsspec URLs.

A source is divided into shards by its names and counts alone, so that every run and every machine divides it alike.
"""

import hashlib
import itertools
import os
import stat
import zipfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from .._utils import first_line, plural
from ..data.decode import DEFAULT_LIMITS, ReadLimits, decode_image, describe_kind, describe_os_error
from ..data.hub_reader import HUB_PREFIX
from ..data.readers import IMAGE_SUFFIXES, ZipReader, is_hidden, is_image_name, open_reader, walk_files
from ..errors import MctfError
from .names import (
    CompactNames,
    UnavailableError,
    expand_pattern,
    is_url,
    open_binary,
    read_location,
    remote_files,
    resolve_beside,
    short_names,
    split_sources,
)

SHARD_SIZE = 10_240  # images; a multiple of every usual batch size, so that no batch is partly empty
_EXPECTED = "give a folder, a zip file, tar or parquet files, a text file of paths, or hf:NAME"
_LISTS = (".txt", ".list", ".lst")
_TARS = (".tar", ".tar.gz", ".tgz")


class Item(NamedTuple):
    """One image of a source: where its encoded bytes are, `place`, is known to the part that made it."""

    part: int
    key: str
    path: str
    place: Any


class Shard(NamedTuple):
    """Images of one part from `start` to `stop`; stop is None for a whole part of unknown length."""

    part: int
    start: int
    stop: int | None


class Part(Protocol):
    """One folder, archive or file of a source.

    name: in messages and paths. count: images, None where only reading tells. indexed: whether images are read one by
    one in any order.
    """

    @property
    def name(self) -> str: ...
    @property
    def count(self) -> int | None: ...
    @property
    def indexed(self) -> bool: ...

    def items(self, start: int, stop: int | None) -> Iterator[tuple[str, str, Any]]:
        """Key, path and place of every image in order, without reading more than needed."""
        ...

    def read(self, place: Any, limits: ReadLimits) -> bytes | Image.Image:
        """One encoded image; raises exceptions of any type."""
        ...

    def fingerprint(self) -> str:
        """A checksum of names and counts, without reading an image."""
        ...

    @property
    def checksum(self) -> str | None:
        """Of the content of an archive, whose names only reading tells; None where the fingerprint tells enough."""
        ...


@dataclass(frozen=True)
class Source:
    """Images by shards. name: as the user wrote it."""

    name: str
    parts: tuple[Part, ...]
    limits: ReadLimits = DEFAULT_LIMITS

    @property
    def count(self) -> int | None:
        """Number of images; None where only reading tells."""
        counts = [part.count for part in self.parts]
        return None if None in counts else sum(count or 0 for count in counts)

    def shards(self, size: int) -> list[Shard]:
        """Shards of at most `size` images, none of two parts; a tar file is one shard."""
        shards: list[Shard] = []
        for number, part in enumerate(self.parts):
            if part.count is None:
                shards.append(Shard(number, 0, None))
                continue
            starts = range(0, part.count, size)
            shards += [Shard(number, start, min(start + size, part.count)) for start in starts]
        return shards

    def items(self, shard: Shard) -> Iterator[Item]:
        """Keys are those of the part; of several parts each begins with the name of its part."""
        prefix = f"{self._part_names[shard.part]}/" if len(self.parts) > 1 else ""
        for key, path, place in self.parts[shard.part].items(shard.start, shard.stop):
            yield Item(shard.part, f"{prefix}{key}", path, place)

    @cached_property
    def _part_names(self) -> list[str]:
        return short_names([part.name for part in self.parts])

    def sample(self, count: int) -> Iterator[Item]:
        """`count` images, evenly spaced where they can be read in any order, else the first ones of every part."""
        total = self.count
        if total is not None and all(part.indexed for part in self.parts):
            starts, number = [0], min(count, total)
            for part in self.parts:
                starts.append(starts[-1] + (part.count or 0))
            for index in (place * total // number for place in range(number)):
                part_number = max(each for each, start in enumerate(starts[:-1]) if start <= index)
                start = index - starts[part_number]
                yield from self.items(Shard(part_number, start, start + 1))
            return
        total, taken = len(self.parts), [0] * len(self.parts)
        chosen = range(total) if count >= total else [place * total // count for place in range(count)]
        shares = [(number, len(chosen) - place) for place, number in enumerate(chosen)]
        shares += [(number, 1) for number in range(total)]  # where some have fewer images than their share
        for number, parts_left in shares:
            share = -(-(count - sum(taken)) // parts_left)
            if share == 0:
                return
            items = self.items(Shard(number, 0, self.parts[number].count))
            for item in itertools.islice(items, taken[number], taken[number] + share):
                taken[number] += 1
                yield item

    def content(self, item: Item) -> bytes | Image.Image:
        """One encoded image, or one that is decoded already; raises UnavailableError, and exceptions of any type."""
        try:
            return self.parts[item.part].read(item.place, self.limits)
        except OSError as failure:
            if failure.errno is None or isinstance(failure, (FileNotFoundError, PermissionError)):
                raise
            raise UnavailableError(describe_os_error(failure)) from None

    def decode(self, item: Item, read: Callable[[], bytes | Image.Image] | None = None) -> Image.Image:
        """One image in RGB; raises MctfError with its path when it is damaged. read: in place of `content`."""
        return decode_image(read or (lambda: self.content(item)), name=item.path, limits=self.limits)

    def digest(self) -> str:
        checksum = hashlib.blake2b(digest_size=16)
        for part in self.parts:
            checksum.update(repr((type(part).__name__, part.count, part.fingerprint())).encode())
        return checksum.hexdigest()


@dataclass(frozen=True)
class Files:
    """Image files one by one: of a folder, below a URL, or named in a text file.

    root: a file or "folder/" beside which names lie that are no whole paths.
    """

    name: str
    root: str
    names: CompactNames
    indexed: bool = True
    checksum: None = None

    @property
    def count(self) -> int:
        return len(self.names)

    def items(self, start: int, stop: int | None) -> Iterator[tuple[str, str, Any]]:
        for name in self.names.slice(start, self.count if stop is None else stop):
            path = resolve_beside(self.root, name)
            yield name, path, path

    def read(self, place: str, limits: ReadLimits) -> bytes:
        return read_location(place, limits)

    def fingerprint(self) -> str:
        checksum = hashlib.blake2b(digest_size=16)
        for name in self.names.slice(0, self.count):
            checksum.update(f"{name}\0".encode(errors="surrogateescape"))
        return checksum.hexdigest()


@dataclass(frozen=True)
class Indexed:
    """A zip file or a dataset of the hub: its directory is in memory, as its library keeps it."""

    name: str
    reader: Any
    indexed: bool = True
    checksum: None = None

    @property
    def count(self) -> int:
        return len(self.reader)

    def items(self, start: int, stop: int | None) -> Iterator[tuple[str, str, Any]]:
        for index in range(start, self.count if stop is None else stop):
            name = self.reader.name(index)
            yield name, f"{self.name}/{name}", index

    def read(self, place: int, limits: ReadLimits) -> bytes | Image.Image:
        if not isinstance(self.reader, ZipReader):
            return self.reader.read(place)
        try:
            return self.reader.content(place)
        except MctfError as failure:  # of the zip file, not of an image in it
            raise UnavailableError(str(failure)) from None

    def fingerprint(self) -> str:
        checksum = hashlib.blake2b(digest_size=16)
        for index in range(self.count):
            checksum.update(repr(self.reader.fingerprint(index)).encode())
        return checksum.hexdigest()


def open_source(
    data: object,
    *,
    column: str | None = None,
    key_column: str | None = None,
    limits: ReadLimits = DEFAULT_LIMITS,
) -> Source:
    """The images of --data: several sources between commas, patterns as {000..127}.tar or *.parquet.

    column: of parquet files, with encoded images or paths. key_column: with a name per image.
    """
    parts: list[Part] = []
    names = split_sources(data)
    if not names or not all(names):
        raise MctfError(f"no images are given: a name in --data is empty, as by an unset shell variable; {_EXPECTED}")
    for path in (each for name in names for each in expand_pattern(name)):
        parts += _open_part(path, column=column, key_column=key_column, limits=limits)
    if (column or key_column) and not any(hasattr(part, "column") for part in parts):
        raise MctfError("--column and --key-column belong to parquet files: leave them out")
    if all(part.count == 0 for part in parts):
        raise MctfError(f"{data} holds no images: expected files ending in {', '.join(IMAGE_SUFFIXES)}")
    name = data if isinstance(data, (str, Path)) else ", ".join(map(str, names))
    short_names([part.name for part in parts])  # all differ
    return Source(str(name), tuple(parts), limits)


def _open_part(path: str, *, column: str | None, key_column: str | None, limits: ReadLimits) -> list[Part]:
    from .archives import Parquet, Tar  # imports pyarrow where it is needed

    if path.startswith(HUB_PREFIX):
        return [Indexed(path, open_reader(path, limits))]
    kind = _kind_of(path)
    if kind == "parquet":
        return [Parquet.open(path, column=column, key_column=key_column)]
    if kind == "tar":
        return [Tar.open(path, limits)]
    if kind == "zip" and is_url(path):
        raise MctfError(f"{path} is a zip file behind a URL: copy it here, or use tar or parquet files")
    if kind == "zip":
        return [Indexed(path, ZipReader(Path(path), limits, labeled=False))]
    if kind == "list":
        return [_open_list(path)]
    return _open_folder(path, column=column, key_column=key_column, limits=limits)


def _kind_of(path: str) -> str:
    lower = path.lower()
    if is_url(path):
        if lower.endswith(_TARS):
            return "tar"
        if lower.endswith(_LISTS):
            return "list"
        return next((kind for kind in ("parquet", "zip") if lower.endswith(f".{kind}")), "folder")
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return "folder"
        odd = describe_kind(mode)
        if odd is not None:
            raise MctfError(f"{path} is {odd}, not a regular file: {_EXPECTED}")
        with open(path, "rb") as file:
            start = file.read(512)
    except (OSError, ValueError) as failure:
        if isinstance(failure, MctfError):
            raise
        missing = isinstance(failure, (FileNotFoundError, NotADirectoryError, ValueError))
        reason = "" if missing else f" that can be read ({first_line(failure)})"
        raise MctfError(f"there is no {path}{reason}: {_EXPECTED}") from None
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith(b"PK\x03\x04"):
        return "zip"
    if start[257:262] == b"ustar" or lower.endswith(_TARS):
        return "tar"
    if lower.endswith(_LISTS):
        return "list"
    if lower.endswith((".parquet", ".zip")):
        raise MctfError(f"{path} is damaged: download it again")
    raise MctfError(f"{path} is no source of images: {_EXPECTED}")


def _open_list(path: str) -> Part:
    """One path or URL per line; relative paths start at the folder of the file."""

    def lines() -> Iterator[str]:
        with open_binary(path) as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError:
                    raise MctfError(f"line {number} of {path} is not UTF-8 text: expected one path per line") from None
                if "\0" in text:
                    raise MctfError(f"line {number} of {path} holds a null byte: expected one path per line")
                if text:
                    yield text

    hashes = array("q")  # a set of the lines would take ten times the memory

    def hashed(texts: Iterator[str]) -> Iterator[str]:
        for text in texts:
            hashes.append(hash(text))
            yield text

    names = CompactNames(hashed(lines()))
    if not len(names):
        raise MctfError(f"{path} is empty: expected one path per line")
    if several := len(names) - len(np.unique(np.asarray(hashes))):
        raise MctfError(f"{path} repeats {plural(several, 'line')}, and lines are keys: remove them (sort -u)")
    return Files(path, path if is_url(path) else os.path.abspath(path), names)


def _open_folder(path: str, **options: Any) -> list[Part]:
    """The images below a folder, and its zip, tar and parquet files.

    A zip file without images is left out. Beside images, so is a parquet file without encoded ones, a table about them.
    """
    other: list[str] = []
    seen = 0

    def images(files: Sequence[str] | Iterator[str]) -> Iterator[str]:
        nonlocal seen
        for name in files:
            seen += 1
            if is_image_name(name):
                yield name
            elif name.lower().endswith((*_TARS, ".zip", ".parquet")) and not is_hidden(name):
                other.append(name)

    root = path.rstrip("/") + "/"
    names = CompactNames(images(remote_files(path) if is_url(path) else walk_files(Path(path))))
    archives = [
        part
        for name in sorted(other)
        if _holds_images(root + name, column=options["column"], alone=not len(names))
        for part in _open_part(root + name, **options)
    ]
    if len(names):
        return [Files(path, root, names), *archives]
    if archives:
        return archives
    if not seen:
        raise MctfError(f"{path} is empty: expected images, tar files or parquet files")
    raise MctfError(f"{path} holds no images: expected files ending in {', '.join(IMAGE_SUFFIXES)}")


def _holds_images(path: str, *, column: str | None, alone: bool) -> bool:
    """Whether an archive in a folder is a part of the source. alone: there are no image files beside it."""
    from .archives import has_image_column

    if path.lower().endswith(".parquet"):
        return alone or column is not None or has_image_column(path)
    if path.lower().endswith(".zip") and not is_url(path):
        with suppress(Exception), zipfile.ZipFile(path) as archive:  # `ZipReader` says what is wrong with it
            return any(map(is_image_name, archive.namelist()))
    return True
