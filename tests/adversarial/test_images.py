"""Hostile and odd images, one beside two good ones: refused by name, skipped and counted on request, or read right."""

import json
import os
import shlex
import socket
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.command_line import Outcome
from helpers.images import encode, make_picture, write_folder
from mctf import MctfError
from mctf.data import ReadLimits, open_dataset

PICTURE = make_picture(0)
NOISE = np.random.default_rng(0).integers(0, 65_536, (40, 48), dtype=np.uint16)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *, depth: int = 8, color: int = 2, pixels: bytes = b"", extra: bytes = b"") -> bytes:
    """A PNG with any header; it holds only the given pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(pixels))
    return b"\x89PNG\r\n\x1a\n" + header + extra + data + chunk(b"IEND", b"")


def bmp(width: int, height: int) -> bytes:
    """A BMP with another size in its header."""
    data = encode(PICTURE, "BMP")
    return data[:18] + struct.pack("<ii", width, height) + data[26:]


def tiff(values: np.ndarray) -> bytes:
    return encode(Image.fromarray(values), "TIFF")


def damaged(form: str, position: float) -> bytes:
    """The file without its end."""
    content = encode(PICTURE, form)
    return content[: int(len(content) * position)]


Make = Callable[[Path], object]


def content(data: bytes) -> Make:
    return lambda path: path.write_bytes(data)


def in_turn(data: bytes) -> bytes:
    """Every third byte after the header is another one."""
    changed = bytearray(data)
    changed[100::3] = bytes(255 - each for each in changed[100::3])
    return bytes(changed)


# what the file x.png is: how it is made, and why it is refused
UNREADABLE: dict[str, tuple[Make, str]] = {
    "empty": (content(b""), "unknown image format"),
    "text": (content(b"not an image\n" * 99), "unknown image format"),
    "html": (content(b"<html><body>404 Not Found</body></html>"), "unknown image format"),
    "svg": (content(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "unknown image format"),
    "zeros": (content(bytes(4096)), "is not a readable image"),
    "all bytes": (content(bytes(range(256)) * 16), "is not a readable image"),
    "zip": (content(b"PK\x03\x04" + bytes(99)), "unknown image format"),
    "eps": (content(encode(PICTURE, "EPS")), "unknown image format"),
    "pdf": (content(b"%PDF-1.4\n%%EOF\n"), "unknown image format"),
    "magic alone": (content(b"\x89PNG\r\n\x1a\n"), "is not a readable image"),
    "header alone": (content(encode(PICTURE)[:40]), "is not a readable image"),
    "half a png": (content(damaged("PNG", 0.5)), "truncated"),
    "half a jpeg": (content(damaged("JPEG", 0.5)), "runcated"),
    "half a webp": (content(damaged("WEBP", 0.5)), "is not a readable image"),
    "half a tiff": (content(damaged("TIFF", 0.5)), "is not a readable image"),
    "half a bmp": (content(damaged("BMP", 0.5)), "is not a readable image"),
    "half a gif": (content(damaged("GIF", 0.5)), "is not a readable image"),
    "changed png": (content(in_turn(encode(PICTURE))), "is not a readable image"),
    "no pixels": (content(png(8, 8)), "is not a readable image"),
    "zero width": (content(png(0, 8)), "is not a readable image"),
    "zero height": (content(png(8, 0)), "is not a readable image"),
    "many pixels": (content(png(12_000, 12_000)), "--max-pixels"),
    "a bomb for pillow": (content(png(60_000, 60_000)), "--max-pixels"),
    "the largest size": (content(png(2**31 - 1, 2**31 - 1)), "is not a readable image"),
    "negative size": (content(png(2**32 - 1, 2**32 - 1)), "is not a readable image"),
    "one column": (content(png(1, 60_000)), "--max-aspect"),
    "one row": (content(png(60_000, 1)), "--max-aspect"),
    "bmp of a huge size": (content(bmp(99_999, 99_999)), "--max-pixels"),
    "ppm of a huge size": (content(b"P6 99999 99999 255\n"), "--max-pixels"),
    "ppm of a strange size": (content(b"P6 -4 4 255\n"), "is not a readable image"),
    "text bomb": (
        content(png(8, 8, extra=chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10_000_000))))),
        "is not a readable image",
    ),
    "float": (content(tiff(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8))), "floating-point"),
    "float with nan": (content(tiff(np.full((8, 8), np.nan, np.float32))), "floating-point"),
    "negative integers": (content(tiff(np.full((8, 8), -5, np.int32))), "integers from -5 to -5"),
    "large integers": (content(tiff(np.full((8, 8), 10**6, np.int32))), "integers from 1000000"),
    "unclear integers": (content(tiff(np.full((8, 8), 200, np.int32))), "integers from 200 to 200"),
    "named pipe": (os.mkfifo, "it is a named pipe"),
    "socket": (lambda path: socket.socket(socket.AF_UNIX).bind(path.name), "it is a socket"),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    "link to a terminal": (lambda path: path.symlink_to("/dev/full"), "it is a device"),
    "broken link": (lambda path: path.symlink_to("nowhere"), "broken link"),
    "link to itself": (lambda path: path.symlink_to(path.name), "is not a readable image"),
    "large file": (lambda path: (path.write_bytes(b"\x89PNG"), os.truncate(path, 2**40)), "--max-bytes"),
}

# odd, and read right: how it is made, and its mean color in red
READABLE: dict[str, tuple[bytes, float]] = {
    "bilevel": (encode(PICTURE.convert("1")), np.asarray(PICTURE.convert("1").convert("L")).mean()),
    "gray": (encode(PICTURE.convert("L")), np.asarray(PICTURE.convert("L")).mean()),
    "gray and alpha": (encode(PICTURE.convert("LA")), np.asarray(PICTURE.convert("L")).mean()),
    "palette": (encode(Image.new("RGB", (8, 8), (51, 0, 0)).convert("P")), 51.0),
    "rgba": (encode(PICTURE.convert("RGBA")), np.asarray(PICTURE)[..., 0].mean()),
    "cmyk": (encode(PICTURE.convert("CMYK"), "TIFF"), np.asarray(PICTURE)[..., 0].mean()),
    "16 bits": (encode(Image.fromarray(NOISE)), NOISE.mean() / 257),
    "16 bits of a tiff": (tiff(NOISE), NOISE.mean() / 257),
    "16 bits, big endian": (
        b"P5 48 40 65535\n" + NOISE.astype(">u2").tobytes(),
        NOISE.mean() / 257,
    ),
    "16 bits of rgb": (
        png(2, 1, depth=16, pixels=b"\0" + bytes([200, 1, 0, 0, 0, 0]) * 2),
        200.0,
    ),
    "one pixel": (encode(Image.new("RGB", (1, 1), (7, 8, 9))), 7.0),
    "narrow": (encode(Image.new("RGB", (1, 90), (7, 8, 9))), 7.0),
    "another suffix": (encode(PICTURE, "BMP"), np.asarray(PICTURE)[..., 0].mean()),
    "gif": (encode(PICTURE.convert("L"), "GIF"), np.asarray(PICTURE.convert("L")).mean()),
    "bytes after the end": (encode(PICTURE) + bytes(999), np.asarray(PICTURE)[..., 0].mean()),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two good images beside which a third one is made."""
    write_folder(tmp_path / "data", "a/1.png", "b/2.png")
    return tmp_path / "data"


@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_image(
    kind: str, folder: Path, refused: Callable[[str, str], str], command: Callable[[str], Outcome], workdir: Path
) -> None:
    make, reason = UNREADABLE[kind]
    path = folder / "a" / "x.png"
    os.chdir(path.parent)  # the name of a socket is short
    make(path)
    os.chdir(workdir)
    data = shlex.quote(str(folder))
    line = refused(f"eval embedded_small --data {data} -r 0", reason)
    assert "a/x.png is not a readable image (" in line
    assert line.endswith("or skip unreadable images (--on-corrupt skip)")
    refused(f"visualize {shlex.quote(str(path))} --model embedded_small", "x.png")

    outcome = command(f"eval embedded_small --data {data} -r 0 --on-corrupt skip --json")
    assert outcome.code == 0, outcome
    assert [line[:24] for line in outcome.err.splitlines()] == ["mctf: warning: skipped: "], outcome
    facts = json.loads(outcome.out)
    assert (facts["images"], facts["skipped"]) == (2, 1)
    assert "1 unreadable image skipped" in facts["notes"]


@pytest.mark.parametrize("kind", READABLE)
def test_odd_image(kind: str, folder: Path, accepted: Callable[[str], Outcome]) -> None:
    data, red = READABLE[kind]
    (folder / "a" / "x.png").write_bytes(data)
    pixels = np.asarray(open_dataset(folder).read(1))
    assert abs(pixels[..., 0].mean() - red) < 1
    outcome = accepted(f"eval embedded_small --data {shlex.quote(str(folder))} -r 0 --json")
    assert outcome.err == ""
    assert json.loads(outcome.out)["images"] == 3


@pytest.mark.parametrize("kind", ["many pixels", "one column", "large file", "text bomb", "named pipe"])
def test_refusal_takes_little_memory(kind: str, folder: Path) -> None:
    UNREADABLE[kind][0](folder / "a" / "x.png")
    dataset = open_dataset(folder, limits=ReadLimits(max_bytes=2**20))
    tracemalloc.start()
    with pytest.raises(MctfError):
        dataset.read(1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**23


def test_file_without_a_size_is_read_to_the_limit(folder: Path) -> None:
    (folder / "a" / "x.png").symlink_to("/proc/self/pagemap")  # endless, and of size 0
    dataset = open_dataset(folder, limits=ReadLimits(max_bytes=10**6))
    with pytest.raises(MctfError, match="raise --max-bytes"):
        dataset.read(1)


@pytest.mark.parametrize(
    ("options", "size", "says"),
    [
        ("--max-pixels 100", (11, 10), "11 x 10 pixels, over the limit of 100)"),
        ("--max-aspect 2", (21, 10), "over the limit of 2 for the aspect ratio"),
        ("--max-bytes 50", (10, 10), "--max-bytes"),
    ],
)
def test_limits_of_the_command(
    options: str, size: tuple[int, int], says: str, tmp_path: Path, refused: Callable[[str, str], str]
) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", size).save(tmp_path / "a" / "x.png")
    refused(f"eval embedded_small --data {tmp_path} -r 0 {options}", says)
    refused(f"visualize {tmp_path}/a/x.png --model embedded_small {options}", says)
    refused(f"compare embedded_small --data {tmp_path} --gflops 0.5 {options}", says)


@pytest.mark.parametrize("options", ["--max-pixels 0", "--max-bytes -1", "--max-aspect 0.5", "--max-aspect nan"])
def test_limits_out_of_range(options: str, folder: Path, refused: Callable[[str, str], str]) -> None:
    refused(f"eval embedded_small --data {folder} -r 0 {options}", options.split()[0][2:].replace("-", "_")[4:])
    refused(
        f"visualize {folder}/a/1.png --model embedded_small {options}", options.split()[0][2:].replace("-", "_")[4:]
    )


def test_all_images_unreadable(folder: Path, command: Callable[[str], Outcome]) -> None:
    for path in folder.rglob("*.png"):
        path.write_bytes(b"text")
    outcome = command(f"eval embedded_small --data {folder} -r 0 --on-corrupt skip")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines()[-1].startswith("mctf: none of 2 images is readable, the first: ")


@pytest.mark.parametrize(
    "name", ["new\nline.png", "bell\a.png", "\x1b[31mred.png", "\u202egnp.png", os.fsdecode(b"\xff\xfe.png"), "a b.png"]
)
def test_names_on_one_line(name: str, folder: Path, refused: Callable[[str, str], str]) -> None:
    (folder / "a" / name).write_bytes(b"text")
    line = refused(f"eval embedded_small --data {folder} -r 0", "is not a readable image")
    assert line.isprintable()
    line.encode()  # no halves of surrogate pairs


def test_mutations_of_a_png_never_raise_another_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    random = np.random.default_rng(0)
    originals = [encode(PICTURE, form) for form in ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM")]
    for number in range(210):
        changed = bytearray(originals[number % len(originals)])
        for position in random.integers(0, min(len(changed), 400), 1 + number % 6):
            changed[position] = random.integers(0, 256)
        (tmp_path / "a" / "x.png").write_bytes(bytes(changed[: len(changed) - number % 5 * 20]))
        try:
            image = open_dataset(tmp_path, limits=ReadLimits(max_pixels=10**6)).read(0)
        except MctfError as error:
            assert str(error).isprintable()  # noqa: PT017
        else:
            assert image.mode == "RGB"


@pytest.mark.slow
def test_reproduce_skips_and_counts(folder: Path, workdir: Path, command: Callable[[str], Outcome]) -> None:
    (folder / "a" / os.fsdecode(b"\xfe\n.png")).write_bytes(b"text")
    data = folder.rename(folder.with_name(os.fsdecode(b"\xff\n[red]")))
    options = "--only class_token --out out --on-corrupt skip --json"
    line = f"reproduce embedded_small --data {shlex.quote(str(data))} {options}"
    outcome = command(line)
    assert outcome.code == 0, outcome
    assert "note: 1 unreadable image skipped" in outcome.err.splitlines()
    assert "1 unreadable image skipped" in json.dumps(json.loads(outcome.out))
    assert "1 unreadable image skipped" in (workdir / "out" / "report.md").read_text()


def test_table_names_the_source_on_one_line(folder: Path, command: Callable[[str], Outcome]) -> None:
    data = folder.rename(folder.with_name(os.fsdecode(b"\xff\n\x1b[31m[red]")))
    outcome = command(f"eval embedded_small --data {shlex.quote(str(data))} -r 0")
    assert outcome.code == 0, outcome
    assert "\\udcff\\n\\x1b[31m[red]" in "".join(outcome.out.split("\n"))


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", ["yes", "no"])
def test_training_skips_in_one_line_each(
    in_memory: str, folder: Path, workdir: Path, command: Callable[[str], Outcome]
) -> None:
    (folder / "a" / "x.png").write_bytes(b"text")
    (folder / "b" / "x.png").write_bytes(png(1, 60_000))
    line = f"finetune embedded_small --data {folder} -r 4 --epochs 1 --batch 2 --in-memory {in_memory} -o out"
    outcome = command(line)
    assert outcome.code == 0, outcome
    warned = [line for line in outcome.err.splitlines() if "skipped:" in line]
    assert len(warned) == 2
    assert all(line.startswith("mctf: warning: skipped: ") for line in warned)
    assert "2 unreadable images skipped" in outcome.out + outcome.err
