"""Names of images, of many files: patterns of sources, and lists of millions of paths that stay small in memory."""

import errno
import glob
import hashlib
import itertools
import os
import posixpath
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from .._utils import first_line, optional_import
from ..data.decode import ReadLimits, UnreadableError, describe_os_error, read_bounded, read_file
from ..errors import MctfError, shown

_BLOCK = 1024  # names per compressed block
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_FILES = 1_000_000  # of one pattern
_SPAN, _SPANS = 2**14, 4  # bytes of a file that its checksum takes at each of several places
_REMOTE_FACTS = ("ETag", "etag", "md5Hash", "content_md5", "sha256", "crc32c")
_REMOTE_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")
# Errors of one file, which another attempt meets again; others come from disks and networks.
_LASTING = frozenset(
    (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EINVAL)
)


class UnavailableError(Exception):
    """A file that cannot be read at present, as on a disk that is not mounted: nothing is known of its content."""


class CompactNames:
    """Strings by index, in compressed blocks: about a tenth of a list of the same paths."""

    def __init__(self, names: Iterable[str]) -> None:
        self._blocks: list[bytes] = []
        self._count = 0
        iterator = iter(names)
        while block := list(itertools.islice(iterator, _BLOCK)):
            self._count += len(block)
            text = "\0".join(block).encode(errors="surrogateescape")  # names of files need not be UTF-8
            self._blocks.append(zlib.compress(text, 1))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> str:
        block, place = divmod(index, _BLOCK)
        return _unpack(self._blocks[block])[place]

    def slice(self, start: int, stop: int) -> Iterator[str]:
        return (self[index] for index in range(start, min(stop, len(self))))


@lru_cache(maxsize=4)
def _unpack(block: bytes) -> list[str]:
    return zlib.decompress(block).decode(errors="surrogateescape").split("\0")


def is_url(path: str) -> bool:
    return "://" in path


def split_sources(source: object) -> list[str]:
    """The parts of --data: between commas that are in no braces, unless a file or folder has the whole name."""
    if isinstance(source, (list, tuple)):
        return [part for each in source for part in split_sources(each)]
    text = str(source)
    if text.strip() and not is_url(text) and os.path.exists(text):
        return [text]
    parts, depth = [""], 0
    for sign in text:
        depth += (sign == "{") - (sign == "}")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def expand_pattern(pattern: str) -> list[str]:
    """The files of "{000..127}.tar", "{a,b}.zip" or "*.parquet", in order; a name without pattern is one file."""
    if not is_url(pattern) and os.path.exists(pattern):
        return [pattern]
    names = list(itertools.islice(_expand_braces(pattern), _MAX_FILES + 1))
    if len(names) > _MAX_FILES:
        raise MctfError(f"{shown(pattern)} names more than {_MAX_FILES:,} files: name fewer")
    found: list[str] = []
    for name in names:
        if not any(sign in name for sign in "*?["):
            found.append(name)
            continue
        matches = remote_glob(name) if is_url(name) else sorted(glob.glob(name, recursive=True))
        if not matches:
            raise MctfError(f"no file matches {name}: check the pattern")
        found += matches
    return found


def _expand_braces(pattern: str) -> Iterator[str]:
    start = pattern.find("{")
    stop = pattern.find("}", start)
    if start < 0 or stop < 0:
        yield pattern
        return
    inside = pattern[start + 1 : stop]
    numbers = _RANGE.fullmatch(inside)
    choices: Iterable[str]
    if numbers is None:
        choices = inside.split(",")
    else:
        low, high = numbers.groups()
        if len(high) > 18 or int(low) > int(high):
            raise MctfError(f"the range {{{inside}}} is empty or too long: write {{000..127}}")
        width = len(low) if low.startswith("0") else 0
        choices = (str(number).zfill(width) for number in range(int(low), int(high) + 1))
    for choice in choices:
        yield from (pattern[:start] + choice + rest for rest in _expand_braces(pattern[stop + 1 :]))


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it."""
    fsspec = optional_import("fsspec", extra="embed", purpose=f"sources such as {url.split('://')[0]}://…")
    try:
        return fsspec.core.url_to_fs(url)
    except Exception as failure:  # unknown protocols and missing packages fail with exceptions of different types
        raise MctfError(f"{shown(url)} cannot be opened ({first_line(failure)}): check the URL") from None


def remote_glob(pattern: str) -> list[str]:
    system, path = file_system(pattern)
    return [system.unstrip_protocol(name) for name in sorted(system.glob(path))]


def remote_files(url: str) -> list[str]:
    """All files below a folder behind a URL, by their paths in it."""
    system, path = file_system(url)
    try:
        base = path.rstrip("/") + "/"
        return sorted(name.removeprefix(base) for name in system.find(path) if name.startswith(base))
    except Exception as failure:  # network, permissions and names fail with exceptions of different types
        raise MctfError(f"{url} cannot be listed ({first_line(failure)}): check the URL") from None


def open_binary(path: str) -> Any:
    """A file or URL, opened for reading; raises MctfError where it cannot be."""
    try:
        if not is_url(path):
            return open(path, "rb")
        system, name = file_system(path)
        return system.open(name, "rb")
    except MctfError:
        raise
    except Exception as failure:
        reason = getattr(failure, "strerror", None) or first_line(failure)
        raise MctfError(f"{path} cannot be opened ({reason}): check the name") from None


def file_checksum(path: str) -> str:
    """What tells a file from another of its name: its size and 64 KiB of it, from its start to its end.

    Behind a URL the size and the checksum that the server tells, else the time of the last change.
    """
    checksum = hashlib.blake2b(digest_size=16)
    with open_binary(path) as file:
        if is_url(path):
            system, name = file_system(path)
            facts: dict[str, Any] = {}
            with suppress(Exception):  # a server that tells nothing
                facts = system.info(name)
            found = next((facts[each] for each in (*_REMOTE_FACTS, *_REMOTE_TIMES) if facts.get(each)), None)
            checksum.update(f"{facts.get('size')} {found}".encode())
            return checksum.hexdigest()
        try:
            size = os.fstat(file.fileno()).st_size
            checksum.update(f"{size}".encode())
            for place in range(_SPANS):
                checksum.update(os.pread(file.fileno(), _SPAN, max(size - _SPAN, 0) * place // (_SPANS - 1)))
        except OSError as failure:
            raise MctfError(f"{path} cannot be read ({describe_os_error(failure)}): check the disk") from None
    return checksum.hexdigest()


def resolve_beside(file: str, path: str) -> str:
    """A path that a file names: a URL or an absolute path as it is, others from the folder of the file on."""
    if is_url(path) or os.path.isabs(path):
        return path
    if not is_url(file):
        return os.path.join(os.path.dirname(file), path)
    protocol, _, place = file.partition("://")
    whole = posixpath.join(posixpath.dirname(place), path)
    if {".", ".."} & set(path.split("/")):  # which object stores do not resolve; other names stay as they are
        whole = posixpath.normpath(whole)
    return f"{protocol}://{whole}"


def location_size(path: str) -> int | None:
    """Bytes of a file or URL; None where that is not known."""
    with suppress(Exception):  # exceptions of file systems are of any type
        if not is_url(path):
            return os.path.getsize(path)
        system, name = file_system(path)
        return system.info(name)["size"]
    return None


def short_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def short_names(paths: Sequence[str]) -> list[str]:
    """The last parts of every path, as few as tell all paths apart; raises MctfError where two are the same."""
    places = [path if is_url(path) or path.startswith("hf:") else os.path.abspath(path) for path in paths]
    parts = [place.rstrip("/").split("/") for place in places]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    twice = next(path for path, place in zip(paths, places, strict=True) if places.count(place) > 1)
    raise MctfError(f"--data names {twice} twice: name it once")


def read_location(path: str, limits: ReadLimits) -> bytes:
    """The content of a file or URL within the limits; raises UnavailableError, and other exceptions of any type.

    A file that is missing beside others is unreadable; one whose folder is empty or missing, too, is unavailable.
    """
    if is_url(path):
        system, name = file_system(path)
        try:
            with system.open(name, "rb") as file:
                return read_bounded(file, limits)
        except (UnreadableError, FileNotFoundError, PermissionError):
            raise
        except Exception as failure:
            status = getattr(failure, "status", None)  # of HTTP: 408 and 429 ask for another attempt
            if isinstance(status, int) and 400 <= status < 500 and status not in (408, 429):
                raise
            raise UnavailableError(first_line(failure)) from None
    try:
        return read_file(Path(path), limits)
    except UnreadableError as failure:
        cause = failure.__cause__
        if not isinstance(cause, OSError) or cause.errno in _LASTING:
            raise
        if cause.errno == errno.ENOENT:
            with suppress(OSError), os.scandir(os.path.dirname(path) or ".") as entries:
                if next(entries, None) is not None:
                    raise
        raise UnavailableError(str(failure)) from None


def read_span(path: str, offset: int, size: int, limits: ReadLimits) -> bytes:
    """Bytes of a file from an offset on."""
    limits.check_bytes(size)
    try:
        with open(path, "rb") as file:
            content = os.pread(file.fileno(), size, offset)
    except OSError as failure:
        raise UnavailableError(f"{path}: {describe_os_error(failure)}") from None
    if len(content) < size:
        raise UnreadableError("its archive ends in it")
    return content
