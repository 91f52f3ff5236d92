"""Tar files and parquet files of images, read from the start to the end.

The names of a tar file are read header by header, so that memory does not grow with it. Loader processes read the
images of an uncompressed local tar file themselves; other bytes are handed to them.
"""

import hashlib
import itertools
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from .._utils import first_line, optional_import, plural
from ..data.decode import DEFAULT_LIMITS, ReadLimits, UnreadableError
from ..data.readers import is_image_name
from ..errors import MctfError, did_you_mean
from .names import file_checksum, is_url, open_binary, read_location, read_span, resolve_beside, short_name

_IMAGE_COLUMNS = ("image", "images", "img", "bytes", "image_bytes", "content", "jpg", "png")
_PATH_COLUMNS = ("path", "image_path", "file", "filename", "url")
_KEY_COLUMNS = ("key", "__key__", "id")
_ROWS = 64  # of a parquet file in memory at once


class _Member(tarfile.TarInfo):
    """A header, or an error: tarfile takes a damaged header and the end of the file for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_Member":
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as failure:
            kind = type(failure).__name__
            if kind in ("EOFHeaderError", "SubsequentHeaderError"):  # the mark of the end; one that tarfile raises
                raise
            reason = "it ends without the mark of its end" if kind == "EmptyHeaderError" else str(failure)
            raise tarfile.ReadError(f"{reason}, at byte {archive.offset:,}") from None


class TooLarge:
    """In place of the bytes of a file that is over the limit: why it is not read."""

    def __init__(self, size: int) -> None:
        self.size = size

    def content(self, limits: ReadLimits) -> bytes:
        limits.check_bytes(self.size)
        raise UnreadableError(f"it takes {self.size:,} bytes")


class Link:
    """In place of the bytes of an entry that has none of its own: a link, or a device."""

    def __init__(self, member: tarfile.TarInfo) -> None:
        self.reason = f"it is a link to {member.linkname}" if member.linkname else "it is no regular file"

    def content(self, limits: ReadLimits) -> bytes:
        raise UnreadableError(self.reason, "pack the image itself (tar --dereference --hard-dereference)")


@dataclass(frozen=True)
class Tar:
    """One tar file, as those of webdataset: images of any ending, in order; its other files are left out."""

    name: str
    checksum: str
    limits: ReadLimits = DEFAULT_LIMITS
    count: None = None
    indexed: bool = False

    @classmethod
    def open(cls, path: str, limits: ReadLimits) -> "Tar":
        return cls(path, file_checksum(path), limits)

    def items(self, start: int, stop: int | None) -> Iterator[tuple[str, str, Any]]:
        in_place = not is_url(self.name) and self.name.lower().endswith(".tar")
        seen = _Keys()
        with open_binary(self.name) as file:
            try:
                mode: Any = "r:" if in_place else "r|*"
                with tarfile.open(fileobj=file, mode=mode, tarinfo=_Member) as archive:
                    for member in iter(archive.next, None):
                        archive.members = []  # type: ignore[attr-defined]  # else it keeps all that it has read
                        name = member.name.removeprefix("./")
                        if member.isdir() or not is_image_name(name):
                            continue
                        place: Any = (member.offset_data, member.size)
                        if not member.isreg():
                            place = Link(member)
                        elif not in_place:
                            fits = member.size <= self.limits.max_bytes
                            content = archive.extractfile(member)
                            place = content.read() if fits and content is not None else TooLarge(member.size)
                        yield seen.key_of(name), f"{self.name}/{name}", place
            except Exception as failure:  # of tarfile, of decompression, and of any file system behind a URL
                raise MctfError(
                    f"{self.name} cannot be read as a tar file ({first_line(failure)}): download it again"
                ) from None

    def read(self, place: Any, limits: ReadLimits) -> bytes:
        if isinstance(place, (TooLarge, Link)):
            return place.content(limits)
        if isinstance(place, bytes):
            return place
        offset, size = place
        return read_span(self.name, offset, size, limits)

    def fingerprint(self) -> str:
        return short_name(self.name)  # without its checksum: a damaged file may be replaced by a whole one


class _Keys:
    """Keys of one tar file, each given once: a name without its ending, with it, or with a number behind it."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()  # digests: names are longer

    def key_of(self, name: str) -> str:
        for key in self._candidates(name):
            digest = hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=8).digest()
            if digest not in self._seen:
                break
        self._seen.add(digest)
        return key

    def _candidates(self, name: str) -> Iterator[str]:
        yield name[: -len(PurePosixPath(name).suffix)]
        yield name  # of a sample with several images
        yield from (f"{name}#{number}" for number in itertools.count(2))  # of an entry that the file has twice


@dataclass(frozen=True)
class Parquet:
    """One parquet file with a column of encoded images (bytes, or structs of bytes and path) or of paths."""

    name: str
    checksum: str
    count: int
    column: str
    key_column: str | None
    indexed: bool = False

    @classmethod
    def open(cls, path: str, *, column: str | None, key_column: str | None) -> "Parquet":
        """The file with its columns checked; the usual names are tried where none is given."""
        with open_binary(path) as file:
            parquet = _parquet_file(path, file)
            schema = {each.name: each.type for each in parquet.schema_arrow}
            for given in (column, key_column):
                if given is not None and given not in schema:
                    raise MctfError(f"{path} has no column {given!r}: {did_you_mean(given, schema)}")
            if column is None:
                column = next((name for name in (*_IMAGE_COLUMNS, *_PATH_COLUMNS) if name in schema), None)
            if column is None:
                raise MctfError(
                    f"{path} has the columns {', '.join(schema)}: name the one with images or paths (--column)"
                )
            kind = str(schema[column])
            if not kind.startswith(("binary", "large_binary", "string", "large_string", "struct<bytes", "struct<path")):
                raise MctfError(f"column {column} of {path} holds {kind:.60}: expected encoded images or paths")
            if key_column is None:
                usual = (name for name in _KEY_COLUMNS if name in schema and name != column)
                key_column = next((name for name in usual if not _repeated(parquet, name)), None)
            elif repeated := _repeated(parquet, key_column):
                raise MctfError(f"column {key_column} of {path} has {repeated}: name one with a key per image")
            return cls(path, file_checksum(path), parquet.metadata.num_rows, column, key_column)

    def items(self, start: int, stop: int | None) -> Iterator[tuple[str, str, Any]]:
        stop = self.count if stop is None else stop
        with open_binary(self.name) as file:
            parquet = _parquet_file(self.name, file)
            groups, first, row = [], None, 0
            for group in range(parquet.num_row_groups):
                rows = parquet.metadata.row_group(group).num_rows
                if row + rows > start and row < stop:
                    groups.append(group)
                    first = row if first is None else first
                row += rows
            columns = [self.column, *([self.key_column] if self.key_column else [])]
            row = first or 0
            try:
                for batch in parquet.iter_batches(_ROWS, row_groups=groups, columns=columns, use_threads=False):
                    low, high = max(start - row, 0), min(stop - row, len(batch))
                    for index in range(low, high):
                        place = batch.column(self.column)[index].as_py()
                        key = batch.column(self.key_column)[index].as_py() if self.key_column else row + index
                        yield str(key), _path_of(place) or f"{self.name}:{row + index}", place
                    row += len(batch)
                    if row >= stop:
                        return
            except Exception as failure:  # of pyarrow for damaged pages, and of any file system behind a URL
                raise MctfError(f"{self.name} is damaged ({first_line(failure):.160}): download it again") from None

    def read(self, place: Any, limits: ReadLimits) -> bytes:
        if isinstance(place, dict):
            place = place.get("bytes") or place.get("path")
        if isinstance(place, str):
            return read_location(resolve_beside(self.name, place), limits)
        if place is None:
            raise UnreadableError("its row is empty", "fill or remove it")
        return place

    def fingerprint(self) -> str:
        return f"{short_name(self.name)} {self.column} {self.key_column}"


def has_image_column(path: str) -> bool:
    """Whether a parquet file holds encoded images under one of the usual names."""
    with open_binary(path) as file:
        schema = {each.name: str(each.type) for each in _parquet_file(path, file).schema_arrow}
    return any(schema.get(name, "").startswith(("binary", "large_binary", "struct<bytes")) for name in _IMAGE_COLUMNS)


def _repeated(parquet: Any, column: str) -> str | None:
    """What a column has that no column of keys may have; None for a good one."""
    compute = optional_import("pyarrow.compute", extra="embed", purpose="parquet files")
    try:
        keys = parquet.read(columns=[column], use_threads=False).column(0)
        several = len(keys) - keys.null_count - compute.count_distinct(keys).as_py()
    except Exception as failure:  # of pyarrow: a damaged page, or values without equality
        return f"no keys that can be compared ({first_line(failure):.80})"
    if keys.null_count or several:
        return f"{plural(keys.null_count, 'empty value')} and {plural(several, 'repeated one')}"
    return None


def _path_of(place: Any) -> str | None:
    path = place.get("path") if isinstance(place, dict) else place
    return path if isinstance(path, str) else None


def _parquet_file(path: str, file: Any) -> Any:
    parquet = optional_import("pyarrow.parquet", extra="embed", purpose="parquet files")
    try:
        return parquet.ParquetFile(file)
    except Exception as failure:  # ArrowInvalid and its kin
        raise MctfError(f"{path} is no readable parquet file ({first_line(failure):.160}): download it again") from None
