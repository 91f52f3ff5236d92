"""From items of a source to vectors: loader processes decode the next batches while the device computes.

On a GPU three things overlap: a thread copies (or decodes) the next batch on a stream of its own, the model runs, and
the vectors of the batch before come back.

Axes: B images, 3 H W, D of the vector.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from PIL import Image
from torch import Tensor

from ..data import num_workers
from ..data.dataset import SKIP_HINT
from ..data.decode import decode_image
from ..data.loader import load_batches
from ..errors import MctfError
from .embedder import Embedder
from .gpu_decode import GpuDecoder, is_plain_jpeg
from .names import UnavailableError
from .sources import Item, Source
from .writers import Arrays

DECODERS = ("cpu", "gpu")
_WAITS = (0.2, 1.0)  # seconds before an image that cannot be read is tried again
_AHEAD = 2  # batches that wait for the model, and batches whose vectors are on their way back
_MANY = 10**9

T = TypeVar("T")


class Sample(NamedTuple):
    """One image: pixels 3 H W, encoded bytes for the GPU, or the reason why there are none.

    failure: of an image that is damaged or missing. unavailable: of one that may be read another time.
    """

    key: str
    path: str
    pixels: Tensor | None = None
    encoded: bytes | None = None
    failure: str | None = None
    unavailable: str | None = None


class LoadedBatch(NamedTuple):
    """Images of one batch. pixels: those decoded, B 3 H W or None; encoded: the others. rows: the place of each.

    A tuple, since that is what the loader can pin. encoded is one tensor with the bytes of all images, of these
    lengths: a tensor per image costs the main process 0.3 ms each. unavailable: why there are no images at all.
    """

    keys: list[str]
    paths: list[str]
    pixels: Tensor | None
    rows: list[int]
    encoded: Tensor | None
    lengths: list[int]
    encoded_rows: list[int]
    failures: list[tuple[str, str, str]]
    unavailable: str | None = None


@dataclass
class Clock:
    """Seconds that the process spent on waiting for images, for the model, and for the disk."""

    decoding: float = 0.0
    model: float = 0.0
    disk: float = 0.0

    @property
    def bound(self) -> str:
        """What took longest: decoding, model or disk."""
        return max(("decoding", "model", "disk"), key=lambda name: getattr(self, name))

    def __add__(self, other: "Clock") -> "Clock":
        return Clock(self.decoding + other.decoding, self.model + other.model, self.disk + other.disk)

    def reset(self) -> None:
        self.decoding = self.model = self.disk = 0.0

    def shares(self) -> dict[str, float]:
        total = self.decoding + self.model + self.disk or 1.0
        return {f"{name}_share": round(getattr(self, name) / total, 4) for name in ("decoding", "model", "disk")}


@dataclass
class ItemLoader:
    """Reads and decodes one item, in a loader process. stop: raise MctfError for an unreadable image."""

    source: Source
    transform: Any
    on_gpu: bool
    stop: bool
    _waited: bool = field(default=False, init=False)  # for the last image, in vain: the next ones are not waited for

    def __call__(self, item: Item) -> Sample:
        try:
            content = self._read(item)
            if self.on_gpu and isinstance(content, bytes) and is_plain_jpeg(content, self.source.limits):
                return Sample(item.key, item.path, encoded=content)
            return Sample(item.key, item.path, pixels=self.transform(self.source.decode(item, lambda: content)))
        except UnavailableError as error:
            reason = f"{item.path} cannot be read ({error}): make it available"
            if self.stop:
                raise MctfError(reason) from None
            return Sample(item.key, item.path, unavailable=reason)
        except MctfError as error:
            if self.stop:
                raise MctfError(f"{error}, or {SKIP_HINT}") from None
            return Sample(item.key, item.path, failure=str(error))

    def _read(self, item: Item) -> bytes | Image.Image:
        """One image after up to 3 attempts; raises UnavailableError, and MctfError for one that is unreadable."""
        waits = iter(() if self._waited else _WAITS)
        while True:
            try:
                content = self.source.content(item)
            except UnavailableError:
                wait = next(waits, None)
                if wait is None:
                    self._waited = True
                    raise
                time.sleep(wait)
            except MctfError:
                raise
            except Exception as failure:
                return self.source.decode(item, partial(_raise, failure))  # says why, with its name
            else:
                self._waited = False
                return content


def _raise(error: Exception) -> NoReturn:
    raise error


def collate(samples: Sequence[Sample]) -> LoadedBatch:
    unavailable = next((sample.unavailable for sample in samples if sample.unavailable is not None), None)
    samples = samples if unavailable is None else []
    read = [sample for sample in samples if sample.failure is None]
    rows = [row for row, sample in enumerate(read) if sample.pixels is not None]
    encoded = {row: sample.encoded for row, sample in enumerate(read) if sample.encoded is not None}
    content = bytearray().join(encoded.values())
    return LoadedBatch(
        [sample.key for sample in read],
        [sample.path for sample in read],
        torch.stack([read[row].pixels for row in rows]) if rows else None,  # type: ignore[misc]
        rows,
        torch.frombuffer(content, dtype=torch.uint8) if encoded else None,
        list(map(len, encoded.values())),
        list(encoded),
        [(sample.key, sample.path, sample.failure) for sample in samples if sample.failure is not None],
        unavailable,
    )


class EmbeddedBatch(NamedTuple):
    """What came out of one batch: rows in order, and the images that are not readable. unavailable: see LoadedBatch."""

    keys: Sequence[str]
    paths: Sequence[str]
    arrays: Arrays
    failures: Sequence[tuple[str, str, str]]
    unavailable: str | None = None


@dataclass(frozen=True)
class Pipeline:
    """An embedder with the images of a source. workers: loader processes, None for the default of `num_workers`."""

    embedder: Embedder
    source: Source
    workers: int | None = None
    decode: str = "cpu"
    stop_on_corrupt: bool = False

    def run(self, batches: Iterable[Sequence[Item]], clock: Clock) -> Iterator[EmbeddedBatch]:
        """Every batch in order, each padded to one shape, so that vectors depend on the batch alone."""
        device = self.embedder.loaded.device
        on_gpu = self.decode == "gpu"
        load = ItemLoader(self.source, self.embedder.transform, on_gpu, self.stop_on_corrupt)
        workers = num_workers(_MANY, device=device, requested=self.workers)
        cuda = device.type == "cuda"
        loaded = load_batches(load, batches, collate, workers=workers, pin_memory=cuda)
        yield from self._on_gpu(loaded, clock) if cuda else self._on_cpu(loaded, clock)

    def _on_cpu(self, batches: Iterator[LoadedBatch], clock: Clock) -> Iterator[EmbeddedBatch]:
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            read = time.perf_counter()
            clock.decoding += read - start
            if batch is None:
                return
            arrays: Arrays = ()
            if batch.pixels is not None:
                arrays = tuple(output.cpu().numpy() for output in self.embedder.run(batch.pixels, pad=True))
            clock.model += time.perf_counter() - read
            yield EmbeddedBatch(batch.keys, batch.paths, arrays, batch.failures, batch.unavailable)

    def _on_gpu(self, batches: Iterator[LoadedBatch], clock: Clock) -> Iterator[EmbeddedBatch]:
        device = self.embedder.loaded.device
        back = torch.cuda.Stream(device)
        pending: deque[tuple[LoadedBatch, tuple[Tensor, ...], torch.cuda.Event | None]] = deque()

        def collect() -> EmbeddedBatch:
            batch, host, event = pending.popleft()
            start = time.perf_counter()
            if event is not None:
                event.synchronize()
            clock.model += time.perf_counter() - start
            arrays = tuple(each.numpy() for each in host)
            return EmbeddedBatch(batch.keys, batch.paths, arrays, batch.failures, batch.unavailable)

        staged = Background(self._staged(batches, device), _AHEAD)
        try:
            while True:
                start = time.perf_counter()
                each = next(staged, None)
                read = time.perf_counter()
                clock.decoding += read - start
                if each is None:
                    break
                batch, pixels, ready = each
                if pixels is None:
                    pending.append((batch, (), None))
                else:
                    current = torch.cuda.current_stream(device)
                    current.wait_event(ready)
                    pixels.record_stream(current)
                    outputs = self.embedder.run(pixels, pad=True)
                    host = tuple(torch.empty(out.shape, dtype=out.dtype, pin_memory=True) for out in outputs)
                    back.wait_stream(current)
                    with torch.cuda.stream(back):
                        for target, output in zip(host, outputs, strict=True):
                            target.copy_(output, non_blocking=True)
                            output.record_stream(back)
                    event = torch.cuda.Event()
                    event.record(back)
                    pending.append((batch, host, event))
                clock.model += time.perf_counter() - read
                while len(pending) > _AHEAD:
                    yield collect()
            while pending:
                yield collect()
        finally:
            staged.close()

    def _staged(
        self, batches: Iterator[LoadedBatch], device: torch.device
    ) -> Iterator[tuple[LoadedBatch, Tensor | None, Any]]:
        """Batches with their pixels on the device, copied or decoded there, and the event after which they are."""
        stream = torch.cuda.Stream(device)
        decoder = GpuDecoder(self.embedder.transform, device)
        for batch in batches:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                pixels = None if batch.pixels is None else batch.pixels.to(device, non_blocking=True)
                if batch.encoded is not None:
                    # nvJPEG writes on a stream of its own, into memory that this one may still read
                    stream.synchronize()
                    batch, pixels = self._decoded(batch, pixels, decoder)
                event = torch.cuda.Event()
                event.record(stream)
            yield batch, pixels, event

    def _decoded(
        self, batch: LoadedBatch, pixels: Tensor | None, decoder: GpuDecoder
    ) -> tuple[LoadedBatch, Tensor | None]:
        """All images of a batch in their order; those that the GPU refuses are decoded here, or become failures."""
        assert batch.encoded is not None
        images: list[Tensor | None] = [None] * len(batch.keys)
        if pixels is not None:
            for row, pixel in zip(batch.rows, pixels, strict=True):
                images[row] = pixel
        failures = list(batch.failures)
        contents = batch.encoded.split(batch.lengths)
        for row, content, image in zip(batch.encoded_rows, contents, decoder(contents), strict=True):
            path = batch.paths[row]
            try:
                if image is None:
                    read = decode_image(content.numpy().tobytes, name=path, limits=self.source.limits)
                    image = self.embedder.transform(read).to(decoder.device)
                images[row] = image
            except MctfError as error:
                if self.stop_on_corrupt:
                    raise MctfError(f"{error}, or {SKIP_HINT}") from None
                failures.append((batch.keys[row], path, str(error)))
        kept = [row for row, image in enumerate(images) if image is not None]
        whole = torch.stack([images[row] for row in kept]) if kept else None  # type: ignore[misc]
        keys, paths = [batch.keys[row] for row in kept], [batch.paths[row] for row in kept]
        return batch._replace(keys=keys, paths=paths, failures=failures), whole


class Background(Iterator[T]):
    """The same items, produced by a thread that is at most `ahead` of them; its exceptions are raised here."""

    def __init__(self, items: Iterator[T], ahead: int) -> None:
        self._items = items
        self._queue: queue.Queue[tuple[bool, Any]] = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ended = False
        self._thread.start()

    def _put(self, entry: tuple[bool, Any]) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put((True, item)):
                    break
            else:
                self._put((False, None))
        except BaseException as error:  # raised again by the consumer
            self._put((False, error))

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        going, value = self._queue.get()
        if going:
            return value
        self._ended = True
        if value is not None:
            raise value
        raise StopIteration

    def close(self) -> None:
        """End the thread, wherever it is."""
        self._stopped.set()
        self._thread.join(10)
