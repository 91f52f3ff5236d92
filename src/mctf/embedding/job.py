"""An embedding job: shards of a source to files in a folder, one after the other, resumable after any interruption.

A shard is the unit of work. Its batches are cut from its first image on, so that vectors do not depend on where an
earlier run stopped.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from .._locks import wait_for_folder
from .._utils import atomic_file, read_json
from ..errors import MctfError, shown
from ..evaluation.environment import describe_device, versions
from .embedder import Embedder
from .gpu_decode import check_gpu_decoding
from .names import location_size
from .pipeline import Clock, Pipeline
from .sources import SHARD_SIZE, Files, Item, Shard, Source
from .writers import Layout, ShardWriter, check_format

MANIFEST = "manifest.json"
_CURE = "name another --output, or repeat that setting"
_PACKAGES = ("torch", "timm", "triton")  # versions of which may round differently
_PROBES = 8  # finished shards of a folder whose first image is looked at
_PATIENCE = 60.0  # seconds for which another process may hold the manifest
_DIGEST_NAMES = {"weights": "the weights", "source": "the images", "preprocessing": "the preprocessing"}

Tick = Callable[[int, str], object]  # called with a number of images and what bounds the run


@dataclass(frozen=True)
class ShardReport:
    """One shard: images and failures. unfinished: why it is not written, None for one that is."""

    number: int
    images: int = 0
    failed: int = 0
    unfinished: str | None = None


@dataclass(frozen=True)
class EmbedJob:
    """What to embed and where to. Picklable: each worker of a cluster gets a copy and loads the model for itself.

    name: of the model. decode: "cpu" or "gpu". on_corrupt: "skip" counts and lists an unreadable image, and leaves a
    shard unfinished where its archive is damaged or a disk is away; "stop" refuses all of these.
    """

    source: Source
    output: Path
    embedder: Embedder
    name: str
    form: str = "parquet"
    shard_size: int = SHARD_SIZE
    decode: str = "cpu"
    on_corrupt: str = "skip"
    workers: int | None = None

    @property
    def shards(self) -> list[Shard]:
        return self.source.shards(self.shard_size)

    @property
    def layout(self) -> Layout:
        return Layout(self.output, self.form, len(self.shards))

    def settings(self) -> dict[str, Any]:
        """Everything that decides the vectors and their files; a folder holds one such setting."""
        embedder = self.embedder
        loaded = embedder.loaded
        facts = {name: loaded.facts[name] for name in ("vector", "method", "method_options", "schedule", "dimension")}
        settings = {
            "version": __version__,
            "model": self.name,
            "weights": loaded.weights,
            **facts,
            "normalize": embedder.normalize,
            "top_k": embedder.top_k,
            "vector_dtype": embedder.vector_dtype,
            "dtype": embedder.dtype,
            "batch_size": embedder.batch_size,
            "compile": embedder.compile,
            "preprocessing": asdict(loaded.preprocessing),
            "decode": self.decode,
            "limits": asdict(self.source.limits),
            "format": self.form,
            "shard_size": self.shard_size,
            "shards": len(self.shards),
            "source": self.source.digest(),
        }
        return json.loads(json.dumps(settings))  # as they are read back

    def prepare(self, *, command: str | None = None) -> str | None:
        """Create the folder and its manifest, or check that they belong to this job.

        Returns a note where other versions of packages began it, whose vectors may differ in their last bits.
        """
        check_format(self.form)
        settings = self.settings()
        with self._manifest_lock() as folder:
            if (self.output / MANIFEST).exists():
                manifest = self._read_manifest()
                self._compare(manifest, settings)
                self._compare_archives()
                self._compare_files()
                return self._other_versions(manifest)
            if strangers := [name for name in os.listdir(self.output) if not name.startswith(".")]:
                raise MctfError(
                    f"{self.output} holds {shown(strangers[0], 60)} and no {MANIFEST}: name an empty --output"
                )
            facts = self.embedder.loaded.facts
            manifest = {
                "settings": settings,
                "weights_file": None if self.embedder.weights is None else str(self.embedder.weights),
                "data": self.source.name,
                "images_listed": self.source.count,
                "gflops": facts["gflops"],
                "gflops_base": facts["gflops_base"],
                "device": None,  # of the first process that computes
                "versions": versions(),
                "command": command,
                "counts": {"shards_finished": 0, "images": 0, "failed": 0},
            }
            self._write_manifest(folder, manifest)
        return None

    def check_device(self) -> None:
        """Raise MctfError where the device of this process cannot do the job."""
        if self.decode == "gpu":
            check_gpu_decoding(self.embedder.loaded.device)

    def pending(self, numbers: Sequence[int]) -> list[int]:
        """Those of these shards that are not finished; what killed runs left behind in finished ones is removed."""
        layout = self.layout
        finished = {number for number in numbers if layout.read_stats(number) is not None}
        layout.sweep(sorted(finished))
        return [number for number in numbers if number not in finished]

    def run(self, numbers: Sequence[int], tick: Tick = lambda images, text: None) -> Generator[ShardReport]:
        """Embed these shards in order, and yield a report of each as soon as it is finished, or cannot be."""
        self._record_device()
        run = _Run(self, numbers)
        try:
            yield from run.shards(tick)
        finally:
            run.close()

    def summarize(self) -> dict[str, Any]:
        """Count what all jobs of this folder have finished, write it into the manifest, and return the counts."""
        layout = self.layout
        with self._manifest_lock() as folder:
            counts = {"shards_finished": 0, "images": 0, "failed": 0}
            for number in range(len(self.shards)):
                stats = layout.read_stats(number)
                if stats is not None:
                    counts["shards_finished"] += 1
                    counts["images"] += stats["images"]
                    counts["failed"] += stats["failed"]
            manifest = self._read_manifest()
            if manifest.get("counts") != counts:
                self._write_manifest(folder, manifest | {"counts": counts})
        return counts

    def first_failure(self) -> str | None:
        """Why the first of the unreadable images of finished shards is not readable."""
        stats = map(self.layout.read_stats, range(len(self.shards)))
        return next((each["failures"][0]["reason"] for each in stats if each and each.get("failures")), None)

    def _record_device(self) -> None:
        """Write the type of device of this process into the manifest, or check that it is the one there."""
        kind = self.embedder.loaded.device.type
        with self._manifest_lock() as folder:
            manifest = self._read_manifest()
            before = manifest.get("device")
            if before is None:
                self._write_manifest(folder, manifest | {"device": kind})
            elif before != kind:
                raise self._differs("device", shown(before, 20), shown(kind))

    def _compare_archives(self) -> None:
        """Raise MctfError where an archive is no longer the file whose images a finished shard holds."""
        layout, parts = self.layout, self.source.parts
        for number, shard in enumerate(self.shards):
            part = parts[shard.part]
            stats = layout.read_stats(number) if part.checksum is not None else None
            if stats is not None and stats.get("checksum") != part.checksum:
                raise MctfError(
                    f"{part.name} is another file than the one whose vectors {self.output} holds: name another "
                    f"--output, or remove {layout.stats(number).name} to embed it again"
                )

    def _compare_files(self) -> None:
        """Raise MctfError where the first image of a finished shard has another size: files of the same names."""
        layout, shards = self.layout, self.shards
        numbers = [number for number, shard in enumerate(shards) if isinstance(self.source.parts[shard.part], Files)]
        step = max(1, len(numbers) // _PROBES)
        for number in numbers[::step]:
            stats = layout.read_stats(number) or {}
            key, size = stats.get("first_key"), stats.get("first_bytes")
            path = next((item.path for item in self.source.items(shards[number]) if item.key == key), None)
            here = None if path is None or size is None else location_size(path)
            if here not in (None, size):
                raise MctfError(
                    f"{path} has {here:,} bytes, and had {size:,} when {self.output} was written: name another "
                    f"--output, or remove {layout.stats(number).name} to embed it again"
                )

    def _other_versions(self, manifest: dict[str, Any]) -> str | None:
        before, here = manifest.get("versions"), versions()
        if not isinstance(before, dict):
            return None
        if not (changed := [name for name in _PACKAGES if before.get(name) != here.get(name)]):
            return None
        differences = ", ".join(
            f"{name} {shown(before.get(name), 40)} there, {here.get(name)!r} here" for name in changed
        )
        return f"{self.output} was begun with other packages ({differences}): vectors may differ in their last bits"

    def _compare(self, manifest: dict[str, Any], settings: dict[str, Any]) -> None:
        before = manifest.get("settings")
        if not isinstance(before, dict):
            raise MctfError(f"{self.output / MANIFEST} was not written by mctf embed: name another --output")
        if not (different := [name for name in settings if settings[name] != before.get(name)]):
            return
        if different == ["source"] or "shards" in different:
            different = sorted(different, key=lambda name: name != "source")
        name = different[0]
        what, old, new = _DIGEST_NAMES.get(name, name), before.get(name), settings[name]
        if name == "source":
            counts = (manifest.get("images_listed"), self.source.count)
            old, new = ("files of unknown length" if each is None else f"{each} listed" for each in counts)
            new = "other names" if old == new else new
        else:
            if isinstance(old, list) and isinstance(new, list):  # a schedule
                old, new = ({f"block {block}": each for block, each in enumerate(amounts)} for amounts in (old, new))
            if isinstance(old, dict) and isinstance(new, dict):
                key = next(key for key in new | old if new.get(key) != old.get(key))
                what, old, new = f"{what} ({key})", old.get(key), new.get(key)
            old, new = shown(old, 60), shown(new, 60)
        raise self._differs(what, old, new, others=different[1:])

    def _differs(self, what: str, old: object, new: object, *, others: Sequence[str] = ()) -> MctfError:
        more = f"; {', '.join(others[:3])} differ, too" if others else ""
        return MctfError(
            f"{self.output} holds vectors of another run, which differs in {what}: {old} there, {new} here{more}: "
            f"{_CURE}"
        )

    def _read_manifest(self) -> dict[str, Any]:
        path = self.output / MANIFEST
        return read_json(path, str(path), "name another --output", most=1 << 26)

    def _write_manifest(self, folder: Path, manifest: dict[str, Any]) -> None:
        try:
            with atomic_file(folder / "manifest", lambda: self.output / MANIFEST, sync=True) as file:
                file.write((json.dumps(manifest, indent=2) + "\n").encode())
        except OSError as failure:
            raise MctfError(
                f"{self.output / MANIFEST} cannot be written ({failure.strerror}): make room, or name another --output"
            ) from None

    @contextmanager
    def _manifest_lock(self) -> Iterator[Path]:
        """The hidden folder in which the manifest is written, held; jobs of one folder wait for each other."""
        folder = self.output / ".manifest"
        try:
            with wait_for_folder(folder, seconds=_PATIENCE, doing="writes", option="--output"):
                for path in folder.iterdir():
                    if not path.name.startswith("."):
                        path.unlink(missing_ok=True)  # of a run that was killed
                yield folder
        finally:
            with suppress(OSError):
                folder.rmdir()


class _Mark(NamedTuple):
    """One batch on its way, or the end of a shard without a further batch."""

    number: int
    batch: bool
    last: bool


class _Run:
    """The shards of one process while they are embedded.

    Batches of all shards flow through one pipeline, so that loader processes go on from shard to shard. Marks tell to
    which shard the next result belongs; the pipeline keeps the order. lost: why shards cannot be finished.
    """

    def __init__(self, job: EmbedJob, numbers: Sequence[int]) -> None:
        self.job, self.numbers = job, numbers
        self.layout, self.all_shards = job.layout, job.shards
        self.marks: deque[_Mark] = deque()
        self.opened: dict[int, ShardWriter] = {}
        self.lost: dict[int, str] = {}
        self.clock = Clock()
        self.total = Clock()
        self.began = time.perf_counter()

    def shards(self, tick: Tick) -> Iterator[ShardReport]:
        job = self.job
        pipeline = Pipeline(job.embedder, job.source, job.workers, job.decode, job.on_corrupt == "stop")
        start, done = time.perf_counter(), 0
        for result in pipeline.run(self._batches(), self.clock):
            while not self.marks[0].batch:
                yield self._finish(self.marks.popleft().number)
            mark = self.marks.popleft()
            writer = self.opened[mark.number]
            if result.unavailable is not None:
                self.lost.setdefault(mark.number, result.unavailable)
            before = time.perf_counter()
            writer.add(result.keys, result.paths, result.arrays)
            for failure in result.failures:
                writer.fail(*failure)
            self.clock.disk += time.perf_counter() - before
            done += len(result.keys)
            speed = done / (time.perf_counter() - start)
            tick(len(result.keys) + len(result.failures), f"{speed:,.0f} images/s, bound by {self._bound()}")
            if mark.last:
                yield self._finish(mark.number)
        while self.marks:
            yield self._finish(self.marks.popleft().number)

    def close(self) -> None:
        for writer in self.opened.values():
            writer.close()
        self.opened.clear()

    def _bound(self) -> str:
        return (self.total + self.clock).bound

    def _batches(self) -> Iterator[list[Item]]:
        """Batches of every shard in turn, never of two. It runs ahead of the results."""
        size = self.job.embedder.batch_size
        embedder, facts = self.job.embedder, self.job.embedder.loaded.facts
        dtype = f"float{embedder.vector_dtype[2:]}"
        for number in self.numbers:
            writer = ShardWriter(self.layout, number)
            self.opened[number] = writer
            if self.layout.read_stats(number) is not None:  # another run has finished it meanwhile
                self.opened.pop(number).close()
                continue
            writer.open(facts["dimension"], dtype, embedder.top_k)
            batch: list[Item] = []
            try:
                for item in self.job.source.items(self.all_shards[number]):
                    if len(batch) == size:
                        self.marks.append(_Mark(number, batch=True, last=False))
                        yield batch
                        batch = []
                    if number in self.lost:
                        break
                    batch.append(item)
            except MctfError as error:  # of an archive
                if self.job.on_corrupt == "stop":
                    raise
                self.lost.setdefault(number, str(error))
                batch = []
            self.marks.append(_Mark(number, batch=bool(batch), last=True))
            if batch:
                yield batch

    def _finish(self, number: int) -> ShardReport:
        writer = self.opened[number]
        if number in self.lost:
            self.opened.pop(number).close()
            return ShardReport(number, unfinished=self.lost[number])
        now = time.perf_counter()
        seconds = now - self.began
        part = self.job.source.parts[self.all_shards[number].part]
        first_key, path = writer.first or (None, None)
        facts = {
            "seconds": round(seconds, 4),
            "images_per_second": round(writer.images / seconds, 2),
            **self.clock.shares(),
            "bound": self.clock.bound,
            "batch_size": self.job.embedder.batch_size,
            "checksum": part.checksum,
            "first_key": first_key,
            "first_bytes": location_size(path) if path is not None and isinstance(part, Files) else None,
            "device": describe_device(self.job.embedder.loaded.device),
            "versions": versions(),
        }
        writer.commit(facts)
        self.opened.pop(number)
        self.clock.disk += time.perf_counter() - now
        self.total += self.clock
        self.clock.reset()
        self.began = time.perf_counter()
        return ShardReport(number, writer.images, writer.failed)
