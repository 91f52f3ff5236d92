"""Decoding: limits before the work, color modes, and Pillow's own words kept off the screen."""

import io
import logging
import os
import socket
import struct
import sys
import threading
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from helpers.images import encode, make_picture
from mctf import MctfError
from mctf.data import ReadLimits
from mctf.data.decode import decode_image, read_bounded, read_file


def decode(content: bytes, **limits: float) -> Image.Image:
    return decode_image(lambda: content, name="x.png", limits=ReadLimits(**limits))  # type: ignore[arg-type]


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


class TestLimits:
    @pytest.mark.parametrize(
        ("size", "reason"),
        [
            ((12_000, 12_000), r"it has 12000 x 12000 pixels, over the limit of 100,000,000\): .*--max-pixels"),
            ((50_000, 50_000), r"it has more than [0-9,]+ pixels\): .*--max-pixels"),
            ((1, 60_000), r"it has 1 x 60000 pixels, over the limit of 100 for the aspect ratio\): .*--max-aspect"),
            ((101, 1), r"it has 101 x 1 pixels, over the limit of 100 for the aspect ratio"),
        ],
    )
    def test_refuse_before_decoding(self, size: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
        with (
            warnings.catch_warnings(action="error"),
            pytest.raises(MctfError, match=rf"^x\.png is not a readable image \({reason}"),
        ):
            decode(png_header(*size))

    def test_of_bytes(self) -> None:
        content = encode(make_picture(0))
        assert decode(content, max_bytes=len(content)).size == (48, 40)
        with pytest.raises(MctfError, match=r"it takes 0\.0 MiB, over the limit of 0\.0 MiB\): .*--max-bytes"):
            decode(content, max_bytes=len(content) - 1)

    def test_can_be_raised_beyond_those_of_pillow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
        assert decode(encode(make_picture(0))).size == (48, 40)

    def test_at_the_limit_pass(self) -> None:
        content = encode(Image.new("RGB", (100, 1), (1, 2, 3)))
        assert decode(content, max_pixels=100, max_aspect=100).getpixel((99, 0)) == (1, 2, 3)

    @pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "9"])
    @pytest.mark.parametrize("name", ["max_bytes", "max_pixels", "max_aspect"])
    def test_of_other_values(self, name: str, value: float) -> None:
        with pytest.raises(MctfError, match=f"{name} is {value!r}: expected a number, 1 or more"):
            ReadLimits(**{name: value})  # type: ignore[arg-type]

    def test_hold_for_a_file_that_claims_less(self) -> None:
        class Endless(io.RawIOBase):
            def read(self, size: int = -1) -> bytes:
                return b"x" * size

        with pytest.raises(Exception, match="over the limit"):
            read_bounded(Endless(), ReadLimits(max_bytes=5_000_000))


class TestModes:
    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"])
    def test_become_rgb(self, mode: str) -> None:
        picture = make_picture(0)
        if mode == "PA":
            picture = picture.convert("P")
        image = decode_image(lambda: picture.convert(mode), name="x")
        assert image.mode == "RGB"
        if mode not in ("1", "L", "LA", "P", "PA"):
            difference = np.abs(np.asarray(image, dtype=int) - np.asarray(make_picture(0), dtype=int))
            assert difference.mean() < 8

    @pytest.mark.parametrize(("mode", "kind"), [("I;16", "<u2"), ("I;16B", ">u2"), ("I", "<i4")])
    def test_sixteen_bits_are_scaled(self, mode: str, kind: str) -> None:
        values = np.array([[0, 128, 129, 257], [32_896, 65_406, 65_407, 65_535]], dtype=kind)
        image = decode_image(lambda: Image.frombytes(mode, (4, 2), values.tobytes()), name="x")
        assert np.asarray(image)[..., 0].tolist() == [[0, 0, 1, 1], [128, 254, 255, 255]]
        assert np.asarray(image).shape == (2, 4, 3)

    @pytest.mark.parametrize("form", ["PNG", "TIFF"])
    def test_sixteen_bits_of_a_file(self, form: str) -> None:
        values = np.random.default_rng(0).integers(0, 65_536, (8, 8), dtype=np.uint16)
        pixels = np.asarray(decode(encode(Image.fromarray(values), form)))
        assert np.array_equal(pixels[..., 1], np.round(values / 257).astype(np.uint8))

    @pytest.mark.parametrize(
        ("values", "reason"),
        [
            (np.zeros((4, 4), np.float32), r"its pixels are floating-point numbers\): convert it to 8 or 16 bits"),
            (np.full((4, 4), -1, np.int32), r"its pixels are integers from -1 to -1\): convert it"),
            (np.full((4, 4), 65_536, np.int32), r"its pixels are integers from 65536 to 65536\): convert it"),
            (np.full((4, 4), 255, np.int32), r"its pixels are integers from 255 to 255\): convert it"),
        ],
    )
    def test_of_unknown_range_are_refused(self, values: np.ndarray, reason: str) -> None:
        with pytest.raises(MctfError, match=reason):
            decode(encode(Image.fromarray(values), "TIFF"))

    def test_first_of_several_frames(self) -> None:
        frames = [Image.new("RGB", (4, 4), (0, 0, shade)) for shade in (10, 250)]
        for form in ("WEBP", "TIFF", "PNG"):
            buffer = io.BytesIO()
            frames[0].save(buffer, form, save_all=True, append_images=frames[1:], lossless=True)
            assert decode(buffer.getvalue()).getpixel((0, 0)) == (0, 0, 10)

    def test_format_whose_decoder_runs_a_program(self) -> None:
        with pytest.raises(MctfError, match="unknown image format"):
            decode(encode(make_picture(0), "EPS"))


class TestFiles:
    @pytest.mark.parametrize(
        ("make", "kind"),
        [
            (os.mkfifo, "a named pipe"),
            (os.mkdir, "a folder"),
            (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "a socket"),
            (lambda path: path.symlink_to("/dev/zero"), "a device"),
        ],
    )
    def test_of_other_kinds_are_not_opened(self, make: Callable[[Path], None], kind: str, tmp_path: Path) -> None:
        make(tmp_path / "x")
        with pytest.raises(MctfError, match=rf"x is not a readable image \(it is {kind}\): give a regular file"):
            decode_image(lambda: read_file(tmp_path / "x"), name="x")

    def test_that_are_missing(self, tmp_path: Path) -> None:
        (tmp_path / "x").symlink_to("nowhere")
        with pytest.raises(MctfError, match=r"there is no such file, or it is a broken link"):
            decode_image(lambda: read_file(tmp_path / "x"), name="x")


class TestQuiet:
    def test_warnings_of_pillow(self, capsys: pytest.CaptureFixture[str]) -> None:
        palette = make_picture(0).convert("P")
        palette.info["transparency"] = bytes(range(256))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            decode_image(lambda: palette, name="x")
            assert not caught
            palette.convert("RGB")  # outside, Pillow warns as before
            assert len(caught) == 1
        assert capsys.readouterr().err == ""

    def test_other_warnings_of_other_threads(self) -> None:
        started, done = threading.Event(), threading.Event()

        def source() -> Image.Image:
            picture = make_picture(0)
            convert = picture.convert

            def slow(mode: str) -> Image.Image:
                started.set()
                done.wait(5)
                return convert(mode)

            picture.convert = slow  # type: ignore[method-assign, assignment]
            return picture

        thread = threading.Thread(target=lambda: decode_image(source, name="x"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            thread.start()
            started.wait(5)
            warnings.warn_explicit("other", UserWarning, "x.py", 1, module="PIL.Image")
            done.set()
            thread.join()
        assert [str(each.message) for each in caught] == ["other"]

    @pytest.mark.skipif(sys.platform != "linux", reason="found by the files that Linux lists")
    def test_libtiff(self, capfd: pytest.CaptureFixture[str]) -> None:
        buffer = io.BytesIO()
        make_picture(0).save(buffer, "TIFF", compression="tiff_deflate")
        content = bytearray(buffer.getvalue())
        start = Image.open(buffer).tag_v2[273][0]  # type: ignore[attr-defined]  # where the pixels are
        content[start + 2 : start + 42] = bytes(range(40))
        with pytest.raises(MctfError, match="decoder error"):
            decode(bytes(content))
        assert capfd.readouterr().err == ""

    def test_log_of_pillow(self) -> None:
        """With a handler of its own, Python does not print its errors on stderr."""
        assert logging.getLogger("PIL").handlers
        assert logging.getLogger("PIL").propagate
