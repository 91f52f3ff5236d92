"""From items to vectors: what is waited for, what is decoded where, and what a failing device or thread says."""

import contextlib
import dataclasses
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from helpers.images import encode, make_picture
from mctf import Embedder, MctfError
from mctf.data import ReadLimits
from mctf.embedding import gpu_decode, pipeline
from mctf.embedding.gpu_decode import GpuDecoder, is_plain_jpeg
from mctf.embedding.names import UnavailableError
from mctf.embedding.pipeline import Background, Clock, ItemLoader, LoadedBatch, Pipeline, Sample, collate
from mctf.embedding.sources import Item, Source, open_source

CPU = torch.device("cpu")
SIZES = [(48, 40), (48, 40), (64, 50), (40, 48)]


def jpeg(seed: int, *, width: int = 48, height: int = 40) -> bytes:
    return encode(make_picture(seed, width=width, height=height), "JPEG")


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder("test_vit", r=0, random_weights=True, image_size=(32, 32), batch_size=8, device="cpu")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """JPEG files of three sizes, a PNG file, and a JPEG file with damaged tables after a whole header."""
    for seed, (width, height) in enumerate(SIZES):
        (tmp_path / f"{seed}.jpg").write_bytes(jpeg(seed, width=width, height=height))
    (tmp_path / "4.png").write_bytes(encode(make_picture(4)))
    whole = jpeg(5)
    tables = whole.index(b"\xff\xc4") + 5
    (tmp_path / "5.jpg").write_bytes(whole[:tables] + b"\xff" * 16 + whole[tables + 16 :])
    (tmp_path / "6.jpg").write_bytes(jpeg(6))
    return open_source(tmp_path)


def items_of(source: Source) -> list[Item]:
    return [item for shard in source.shards(100) for item in source.items(shard)]


def load(source: Source, embedder: Embedder, *, on_gpu: bool) -> LoadedBatch:
    loader = ItemLoader(source, embedder.transform, on_gpu=on_gpu, stop=False)
    return collate([loader(item) for item in items_of(source)])


def test_encoded_images_travel_as_one_tensor(source: Source, embedder: Embedder) -> None:
    batch = load(source, embedder, on_gpu=True)
    assert batch.keys == ["0.jpg", "1.jpg", "2.jpg", "3.jpg", "4.png", "5.jpg", "6.jpg"]
    assert batch.encoded_rows == [0, 1, 2, 3, 5, 6]
    assert batch.rows == [4]
    contents = [each.numpy().tobytes() for each in batch.encoded.split(batch.lengths)]
    assert contents == [source.content(items_of(source)[row]) for row in batch.encoded_rows]


def refuse_one(encoded: list[Tensor], **options: object) -> list[Tensor]:
    """torchvision's decoder, which refuses a JPEG file that Pillow reads, as nvJPEG does with some."""
    from torchvision.io import decode_jpeg

    if any(each.numpy().tobytes() == jpeg(6) for each in encoded):
        raise RuntimeError("nvJPEG refuses it")
    return decode_jpeg(encoded, **options)


def test_what_the_gpu_refuses_is_decoded_by_pillow(
    source: Source, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchvision.io.decode_jpeg", refuse_one)
    plain, batch = (load(source, embedder, on_gpu=on_gpu) for on_gpu in (False, True))
    run = Pipeline(embedder, source, decode="gpu")
    batch, pixels = run._decoded(batch, batch.pixels, GpuDecoder(embedder.transform, CPU))
    assert batch.keys == plain.keys == ["0.jpg", "1.jpg", "2.jpg", "3.jpg", "4.png", "6.jpg"]
    assert [key for key, _, _ in batch.failures] == ["5.jpg"]
    assert "5.jpg is not a readable image" in batch.failures[0][2]
    # Pillow resizes in 8 bits, and tensors are resized in float32
    assert (pixels.int() - plain.pixels.int()).abs().max() <= 3
    assert torch.equal(pixels[4:], plain.pixels[4:])
    stopping, batch = dataclasses.replace(run, stop_on_corrupt=True), load(source, embedder, on_gpu=True)
    with pytest.raises(MctfError, match=r"5.jpg is not a readable image.*--on-corrupt skip"):
        stopping._decoded(batch, batch.pixels, GpuDecoder(embedder.transform, CPU))


@pytest.mark.parametrize("says", ["CUDA out of memory. Tried to allocate 2 GiB", "CUDA error: an illegal access"])
def test_a_failing_device_is_no_unreadable_image(
    source: Source, embedder: Embedder, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise RuntimeError(says)

    batch = load(source, embedder, on_gpu=True)
    monkeypatch.setattr("torchvision.io.decode_jpeg", fail)
    with pytest.raises(MctfError, match=r"cpu fails while it decodes JPEG files \(CUDA .*lower the batch size"):
        GpuDecoder(embedder.transform, CPU)(batch.encoded.split(batch.lengths))


@pytest.mark.parametrize(
    ("content", "plain"),
    [
        (jpeg(0), True),
        (jpeg(0) + b"\0\0", True),
        (encode(make_picture(0).convert("L"), "JPEG"), True),
        (encode(make_picture(0).convert("CMYK"), "JPEG"), False),
        (jpeg(0)[:-2], False),
        (encode(make_picture(0)), False),
        (jpeg(0, width=300, height=300), False),
        (b"\xff\xd8\xff nothing \xff\xd9", False),
        (b"", False),
    ],
)
def test_which_files_the_gpu_may_decode(content: bytes, plain: bool) -> None:
    assert is_plain_jpeg(content, ReadLimits(max_pixels=50_000)) is plain


class Disk:
    """A source whose images cannot be read a number of times."""

    limits = ReadLimits()

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def content(self, _item: Item) -> bytes:
        self.failures -= 1
        if self.failures >= 0:
            raise UnavailableError("Input/output error")
        return jpeg(0)

    def decode(self, _item: Item, read: object) -> Image.Image:
        return Image.open(io.BytesIO(read()))  # type: ignore[operator]


def test_what_cannot_be_read_is_tried_again(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(pipeline.time, "sleep", waited.append)
    item = Item(0, "a", "disk/a.jpg", "")
    loader = ItemLoader(Disk(2), embedder.transform, on_gpu=False, stop=False)
    assert loader(item).pixels is not None
    assert len(waited) == 2
    loader = ItemLoader(Disk(5), embedder.transform, on_gpu=False, stop=False)
    samples = [loader(item) for _ in range(4)]
    assert [sample.unavailable is None for sample in samples] == [False, False, False, True]
    assert len(waited) == 4  # for the first one alone
    assert samples[0].unavailable == "disk/a.jpg cannot be read (Input/output error): make it available"
    batch = collate(samples)
    assert (batch.keys, batch.pixels, batch.unavailable) == ([], None, samples[0].unavailable)
    with pytest.raises(MctfError, match="cannot be read"):
        ItemLoader(Disk(3), embedder.transform, on_gpu=False, stop=True)(item)


def test_a_background_thread_keeps_order_and_stays_near() -> None:
    made: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(50):
            made.append(number)
            yield number

    background = Background(numbers(), 2)
    for number in range(50):
        assert next(background) == number
        assert len(made) <= number + 5
    assert next(background, None) is None
    assert next(background, None) is None


def test_an_exception_of_the_background_is_raised_by_the_consumer() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise MctfError("no more")

    background = Background(numbers(), 2)
    assert next(background) == 1
    with pytest.raises(MctfError, match="no more"):
        next(background)
    assert next(background, None) is None


def test_a_closed_background_ends_its_thread() -> None:
    before = threading.active_count()
    background = Background(iter(range(10**9)), 2)
    assert next(background) == 0
    background.close()
    assert not background._thread.is_alive()
    assert threading.active_count() <= before


def test_shares_of_the_clock() -> None:
    assert Clock(3.0, 1.0, 0.0).shares() == {"decoding_share": 0.75, "model_share": 0.25, "disk_share": 0.0}
    assert [Clock(3.0, 1.0).bound, Clock(1.0, 3.0).bound, Clock(1.0, 1.0, 2.0).bound] == ["decoding", "model", "disk"]
    assert sum(Clock().shares().values()) == 0


class Stream:
    """A stand-in for streams and events of CUDA. calls: what was called on any of them, and "decode"."""

    calls: ClassVar[list[str]] = []

    def __init__(self, _device: object = None) -> None:
        """Streams take a device."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_arguments: self.calls.append(name)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for CUDA streams runs on the CPU, where everything is done at once."""
    from torchvision.io import decode_jpeg

    def decode(*arguments: object, **options: object) -> list[Tensor]:
        Stream.calls.append("decode")
        return decode_jpeg(*arguments, **options)

    empty = torch.empty
    monkeypatch.setattr(Stream, "calls", [])
    monkeypatch.setattr("torchvision.io.decode_jpeg", decode)
    for name, value in (("Stream", Stream), ("Event", Stream), ("current_stream", Stream)):
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    monkeypatch.setattr(Tensor, "record_stream", lambda _tensor, _stream: None)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_batches_on_streams_keep_their_order(no_cuda: None, source: Source, embedder: Embedder, on_gpu: bool) -> None:
    run = Pipeline(embedder, source, decode="gpu" if on_gpu else "cpu")
    loader, clock = ItemLoader(source, embedder.transform, on_gpu=on_gpu, stop=False), Clock()
    items = items_of(source) * 4
    batches = [[loader(item) for item in items[start : start + 5]] for start in range(0, len(items), 5)]
    unread = collate([Sample("7.jpg", "7.jpg", unavailable="the disk is away")])
    results = list(run._on_gpu(iter([*map(collate, batches), unread]), clock))
    assert [key for result in results for key in result.keys] == [item.key for item in items if item.key != "5.jpg"]
    assert [key for result in results for key, _, _ in result.failures] == ["5.jpg"] * 4
    assert [result.unavailable for result in results] == [None] * len(batches) + ["the disk is away"]
    for result in results[:-1]:
        images = [source.content(items[int(key[0])]) for key in result.keys]
        # nothing differs where Pillow decodes; tensors are resized in float32
        assert np.allclose(result.arrays[0], embedder(images), atol=0.1 if on_gpu else 1e-5)
    assert clock.bound in ("decoding", "model")
    decodes = [place for place, call in enumerate(Stream.calls) if call == "decode"]
    assert bool(decodes) == on_gpu
    assert not decodes or "synchronize" in Stream.calls[: decodes[0]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("decode", ["cpu", "gpu"])
def test_a_gpu_gives_every_image_in_order(source: Source, decode: str) -> None:
    gpu_decode.check_gpu_decoding(torch.device("cuda"))
    embed = Embedder("test_vit", r=0, random_weights=True, image_size=(32, 32), batch_size=3, device="cuda")
    items, clock = items_of(source) * 8, Clock()
    batches = [items[start : start + 3] for start in range(0, len(items), 3)]
    results = list(Pipeline(embed, source, workers=0, decode=decode).run(batches, clock))
    keys = [key for result in results for key in result.keys]
    assert keys == ["0.jpg", "1.jpg", "2.jpg", "3.jpg", "4.png", "6.jpg"] * 8
    assert sum(len(result.failures) for result in results) == 8
    vectors = np.concatenate([result.arrays[0] for result in results if result.arrays])
    expected = embed([source.content(item) for item in items if item.key != "5.jpg"])
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if decode == "cpu" else {"rtol": 0.05, "atol": 0.1}  # nvJPEG rounds
    assert np.allclose(vectors, expected, **tolerance)
    assert clock.model > 0
    assert clock.decoding > 0
