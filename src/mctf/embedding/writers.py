"""Files of one shard: parquet, npy in the layout of clip-retrieval and autofaiss, or lance; whole or not at all.

A shard is written into a hidden folder that its process locks, flushed to the disk and renamed. Its _stats.json is
renamed last: a shard without it is not finished, whatever else there is.

Axes: B images, D of the vector.
"""

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from .._locks import FolderHeldError, lock_folder
from .._utils import first_line, optional_import
from ..errors import MctfError

FORMATS = ("parquet", "npy", "lance")
_ROWS = 8192  # of a parquet row group: 32 MB of float32 vectors of 1024
_FEW_FAILURES = 100  # listed in the stats; the file of failures has all

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, ...]  # vectors B D; with top-k also probabilities and classes, B k


class Table(ABC):
    """The rows of one shard, added in batches. files: target below the output folder by temporary file."""

    files: dict[Path, str]

    @abstractmethod
    def add(self, keys: Sequence[str], paths: Sequence[str], arrays: Arrays) -> None: ...

    @abstractmethod
    def finish(self) -> None:
        """Write what is missing and close all files."""

    @abstractmethod
    def abandon(self) -> None:
        """Close all files; never raises."""


class ParquetTable(Table):
    """Columns key, path, embedding (a list of fixed size); top_probabilities and top_classes where they are asked for.

    The schema comes from the first batch, so an empty shard needs the dimension. path: the name of that column.
    """

    def __init__(self, folder: Path, name: str, dimension: int, dtype: str, top_k: int, *, path: str = "path") -> None:
        self.arrow = optional_import("pyarrow", extra="embed", purpose="files of vectors")
        parquet = optional_import("pyarrow.parquet", extra="embed", purpose="files of vectors")
        arrow = self.arrow
        columns = {"key": arrow.string(), path: arrow.string()}
        kinds = []
        if dimension:
            kinds.append(("embedding", arrow.float16() if dtype == "float16" else arrow.float32(), dimension))
        if top_k:
            kinds += [("top_probabilities", arrow.float32(), top_k), ("top_classes", arrow.int64(), top_k)]
        self.kinds = kinds
        self.schema = arrow.schema([*columns.items(), *((name, arrow.list_(kind, size)) for name, kind, size in kinds)])
        temporary = folder / "rows"
        self.files = {temporary: name}
        self.file = temporary.open("wb")
        self.writer = parquet.ParquetWriter(self.file, self.schema)
        self.pending: list[Any] = []

    def add(self, keys: Sequence[str], paths: Sequence[str], arrays: Arrays) -> None:
        lists = [
            self.arrow.FixedSizeListArray.from_arrays(self.arrow.array(array.reshape(-1), kind), size)
            for array, (_, kind, size) in zip(arrays, self.kinds, strict=True)
        ]
        columns = [self.arrow.array([*map(_text, each)], self.arrow.string()) for each in (keys, paths)]
        self.pending.append(self.arrow.record_batch([*columns, *lists], schema=self.schema))
        if sum(map(len, self.pending)) >= _ROWS:
            self._flush()

    def _flush(self) -> None:
        if self.pending:
            self.writer.write_table(self.arrow.Table.from_batches(self.pending), row_group_size=1 << 30)
            self.pending = []

    def finish(self) -> None:
        self._flush()
        self.writer.close()
        self.file.close()

    def abandon(self) -> None:
        with suppress(Exception):  # it writes a footer, for which there may be no space
            self.writer.close()
        with suppress(OSError):
            self.file.close()


class NpyTable(Table):
    """img_emb/img_emb_000.npy and metadata/metadata_000.parquet with the columns key and image_path, row by row."""

    def __init__(self, folder: Path, number: str, dimension: int, dtype: str, top_k: int) -> None:
        self.rows = ParquetTable(folder, f"metadata/metadata_{number}.parquet", 0, dtype, top_k, path="image_path")
        temporary = folder / "vectors"
        self.files = {temporary: f"img_emb/img_emb_{number}.npy", **self.rows.files}
        self.count, self.dimension, self.dtype = 0, dimension, np.dtype(dtype)
        self.file = temporary.open("wb")
        self._header()

    def _header(self) -> None:
        """numpy leaves room for a larger number of rows, so that the header keeps its length."""
        facts = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count, self.dimension)}
        np.lib.format.write_array_header_1_0(self.file, facts)

    def add(self, keys: Sequence[str], paths: Sequence[str], arrays: Arrays) -> None:
        self.file.write(np.ascontiguousarray(arrays[0]).tobytes())
        self.count += len(arrays[0])
        self.rows.add(keys, paths, arrays[1:])

    def finish(self) -> None:
        self.rows.finish()
        start = self.file.tell() - self.count * self.dimension * self.dtype.itemsize
        self.file.seek(0)
        self._header()
        if self.file.tell() != start:
            raise MctfError(f"numpy {np.__version__} writes headers of two lengths: use --format parquet")
        self.file.close()

    def abandon(self) -> None:
        self.rows.abandon()
        with suppress(OSError):
            self.file.close()


class LanceTable(ParquetTable):
    """The columns of parquet as a lance dataset, a folder."""

    def __init__(self, folder: Path, name: str, dimension: int, dtype: str, top_k: int) -> None:
        self.lance = optional_import("lance", extra="lance", purpose="lance files")
        super().__init__(folder, "unused", dimension, dtype, top_k)
        self.abandon()
        (folder / "rows").unlink()
        self.target = folder / "dataset"
        self.files = {self.target: name}

    def _flush(self) -> None:
        """Rows are kept until the end."""

    def finish(self) -> None:
        table = self.arrow.Table.from_batches(self.pending, schema=self.schema)
        self.lance.write_dataset(table, str(self.target), mode="create")


def check_format(name: str) -> None:
    """Raise MctfError where the packages of a format are missing."""
    optional_import("pyarrow", extra="embed", purpose="files of vectors")
    if name == "lance":
        optional_import("lance", extra="lance", purpose="lance files")


class Layout:
    """Names of all files of an output folder. total: number of shards, which decides how many digits a name has."""

    def __init__(self, output: Path, form: str, total: int) -> None:
        self.output, self.form = output, form
        self.digits = max(3 if form == "npy" else 5, len(str(max(total - 1, 0))))

    def name(self, number: int) -> str:
        return str(number).zfill(self.digits)

    def stats(self, number: int) -> Path:
        return self.output / f"{self.name(number)}_stats.json"

    def working_folder(self, number: int) -> Path:
        return self.output / f".{self.name(number)}"

    def table(self, number: int, folder: Path, dimension: int, dtype: str, top_k: int) -> Table:
        name = self.name(number)
        if self.form == "npy":
            return NpyTable(folder, name, dimension, dtype, top_k)
        kind = LanceTable if self.form == "lance" else ParquetTable
        return kind(folder, f"{name}.{self.form}", dimension, dtype, top_k)

    def read_stats(self, number: int) -> dict[str, Any] | None:
        """The stats of a finished shard; None where it is not finished, or one of its files is not as it was."""
        try:
            stats = json.loads(self.stats(number).read_bytes())
            files = stats["files"]
            counted = all(type(stats[name]) is int for name in ("images", "failed"))
            whole = counted and files and all(_size(self.output / name) == size for name, size in files.items())
            return stats if whole else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @contextmanager
    def lock(self, number: int) -> Iterator[Path]:
        """The working folder of a shard, empty and held by this process."""
        folder = self.working_folder(number)
        try:
            with lock_folder(folder, doing="writes", option="--output"):
                _empty(folder)
                try:
                    yield folder
                finally:
                    _empty(folder)
        finally:
            with suppress(OSError):
                folder.rmdir()

    def sweep(self, numbers: Sequence[int]) -> None:
        """Remove the working folders that killed runs left behind, of these shards."""
        for number in numbers:
            if self.working_folder(number).exists():
                with suppress(FolderHeldError), self.lock(number):
                    pass


class ShardWriter:
    """One shard while it is written; `commit` finishes it, `close` without it leaves nothing behind."""

    def __init__(self, layout: Layout, number: int) -> None:
        self.layout, self.number = layout, number
        self.images = self.failed = 0
        self.first: tuple[str, str] | None = None  # key and path of the first image
        self.few: list[dict[str, str]] = []
        self._table: Table | None = None
        self._failures: IO[str] | None = None
        self._stack = ExitStack()
        with self._refusing():
            self.folder = self._stack.enter_context(layout.lock(number))

    def open(self, dimension: int, dtype: str, top_k: int) -> None:
        with self._refusing():
            self._table = self.layout.table(self.number, self.folder, dimension, dtype, top_k)

    def add(self, keys: Sequence[str], paths: Sequence[str], arrays: Arrays) -> None:
        assert self._table is not None
        if len({len(keys), len(paths), *map(len, arrays or [()])}) > 1:
            vectors = min(map(len, arrays), default=0)
            raise MctfError(f"shard {self.number} has {vectors} vectors for {len(keys)} images: report this as a bug")
        if len(keys):
            with self._refusing():
                self._table.add(keys, paths, arrays)
            self.images += len(keys)
            self.first = self.first or (keys[0], paths[0])

    def fail(self, key: str, path: str, reason: str) -> None:
        """List an image that is not readable."""
        entry = {"key": _text(key), "path": _text(path), "reason": reason}
        with self._refusing():
            if self._failures is None:
                self._failures = (self.folder / "failures").open("w", encoding="utf-8")
            self._failures.write(json.dumps(entry) + "\n")
        self.failed += 1
        if len(self.few) < _FEW_FAILURES:
            self.few.append(entry)

    def commit(self, facts: dict[str, Any]) -> None:
        """Flush, rename, and write the stats."""
        assert self._table is not None
        output = self.layout.output
        with self._refusing():
            self._table.finish()
            files = dict(self._table.files)
            if self._failures is not None:
                self._failures.close()
                files[self.folder / "failures"] = f"{self.layout.name(self.number)}_failures.jsonl"
            else:
                (output / f"{self.layout.name(self.number)}_failures.jsonl").unlink(missing_ok=True)
            stats = {"shard": self.number, "images": self.images, "failed": self.failed, **facts}
            stats |= {"files": {name: _size(temporary) for temporary, name in files.items()}, "failures": self.few}
            temporary = self.folder / "stats"
            temporary.write_text(json.dumps(stats, indent=2) + "\n", encoding="utf-8")
            files[temporary] = self.layout.stats(self.number).name
            self.layout.stats(self.number).unlink(missing_ok=True)  # of files that were changed since
            for temporary in files:
                _sync(temporary)
            for temporary, name in files.items():
                target = output / name
                target.parent.mkdir(exist_ok=True)
                if target.is_dir():
                    shutil.rmtree(target)
                os.replace(temporary, target)
                _sync(target.parent)
        self._table = None
        self.close()

    def close(self) -> None:
        if self._table is not None:
            self._table.abandon()
            self._table = None
        if self._failures is not None:
            with suppress(OSError):
                self._failures.close()
        self._stack.close()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """OSError, as of a full disk, in one line."""
        try:
            yield
        except OSError as failure:
            reason = failure.strerror or first_line(failure)
            raise MctfError(
                f"shard {self.number} cannot be written to {self.layout.output} ({reason}): finished shards are whole; "
                "make room, then run the command again"
            ) from None


def _text(name: str) -> str:
    """Names of files need not be UTF-8."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _size(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    if path.is_dir():
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return path.stat().st_size


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk, with what is in it."""
    for each in [path, *(path.rglob("*") if path.is_dir() and path.name == "dataset" else ())]:
        handle = os.open(each, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _empty(folder: Path) -> None:
    """Remove all but the lock."""
    for path in folder.iterdir():
        if not path.name.startswith(".mctf"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
