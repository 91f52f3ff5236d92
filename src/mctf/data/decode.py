"""From a file to an RGB image: the one place that reads and decodes, within limits on what one image may cost."""

import ctypes
import errno
import io
import logging
import math
import os
import stat
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from .._utils import first_line
from ..errors import MctfError

# Formats whose decoders run no other program, as that of EPS does, and whose header has the size of the picture.
_FORMATS = (
    *("JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "GIF", "MPO", "AVIF", "JPEG2000"),
    *("DIB", "PCX", "QOI", "SGI", "TGA", "XBM"),
)
# Pillow converts these to 8-bit RGB without a loss of range.
_CONVERTIBLE = frozenset(
    ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV", "LAB")
)
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

_SHRINK = "make it smaller, remove it or raise --max-pixels"
_STEP = 2**20  # bytes read at a time

logging.getLogger("PIL").addHandler(logging.NullHandler())  # else Python prints what its decoders log on stderr


@dataclass(frozen=True)
class ReadLimits:
    """What one image may cost.

    max_bytes: of the encoded file, unpacked where it lies in a zip file. max_pixels: width x height.
    max_aspect: the longer side over the shorter one, which becomes as long as the model's input before the crop.
    """

    max_bytes: int = 2**28
    max_pixels: int = 100_000_000
    max_aspect: float = 100.0

    def __post_init__(self) -> None:
        for name, low in (("max_bytes", 1), ("max_pixels", 1), ("max_aspect", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < math.inf:
                raise MctfError(f"{name} is {value!r}: expected a number, {low} or more")

    @classmethod
    def of(
        cls, *, max_bytes: int | None = None, max_pixels: int | None = None, max_aspect: float | None = None
    ) -> "ReadLimits":
        """These limits, and the default for None."""
        given = {"max_bytes": max_bytes, "max_pixels": max_pixels, "max_aspect": max_aspect}
        return cls(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    def check_bytes(self, count: int) -> None:
        if count > self.max_bytes:
            size = f"{count / 2**20:,.1f} MiB, over the limit of {self.max_bytes / 2**20:,.1f} MiB"
            raise UnreadableError(f"it takes {size}", "make it smaller, remove it or raise --max-bytes")

    def check_size(self, width: int, height: int) -> None:
        size = f"it has {width} x {height} pixels"
        if min(width, height) < 1:
            raise UnreadableError(size)
        if width * height > self.max_pixels:
            raise UnreadableError(f"{size}, over the limit of {self.max_pixels:,}", _SHRINK)
        if max(width, height) > self.max_aspect * min(width, height):
            raise UnreadableError(
                f"{size}, over the limit of {self.max_aspect:g} for the aspect ratio",
                "crop it, remove it or raise --max-aspect",
            )


DEFAULT_LIMITS = ReadLimits()


class UnreadableError(Exception):
    """Why an image is not read, and the cure."""

    def __init__(self, reason: str, cure: str = "repair or remove it") -> None:
        super().__init__(reason)
        self.cure = cure


def decode_image(
    source: Callable[[], bytes | Image.Image], *, name: str, limits: ReadLimits = DEFAULT_LIMITS, upright: bool = False
) -> Image.Image:
    """One image in RGB, 8 bits per channel; raises MctfError with its name when it is damaged or over the limits.

    source: gives the encoded image, or one that Pillow has opened. upright: follow the orientation tag.
    Of several frames the first is taken. 16 bits are scaled to 8.
    """
    try:
        content = source()
        with _decoding:
            image = content if isinstance(content, Image.Image) else _open(content, limits)
            limits.check_size(*image.size)
            return _to_rgb(ImageOps.exif_transpose(image) if upright else image, image.format)
    except UnreadableError as error:
        reason, cure = str(error), error.cure
    except UnidentifiedImageError:
        reason, cure = "unknown image format", UnreadableError("").cure
    except Exception as error:  # decoders raise exceptions of any type on damaged files
        reason, cure = first_line(error), UnreadableError("").cure
    raise MctfError(f"{name} is not a readable image ({reason}): {cure}")


def read_file(path: Path, limits: ReadLimits = DEFAULT_LIMITS) -> bytes:
    """The content of a regular file; raises UnreadableError for other kinds, which may never end, and large files."""
    try:
        _check_regular(path.stat())  # before it is opened, which may have an effect on a device
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(file, "rb") as content:
            status = os.fstat(content.fileno())
            _check_regular(status)
            limits.check_bytes(status.st_size)
            return read_bounded(content, limits)
    except OSError as error:
        raise UnreadableError(describe_os_error(error)) from error


def read_bounded(file: IO[bytes], limits: ReadLimits, *, step: int = _STEP) -> bytes:
    """All of a file; raises UnreadableError as soon as it is over the limit, whatever size it claims.

    step: bytes per call, where a call may need much more memory than it returns.
    """
    limit = limits.max_bytes + 1
    content = bytearray()
    while len(content) < limit and (chunk := file.read(min(step, limit - len(content)))):
        content += chunk
    limits.check_bytes(len(content))
    return bytes(content)


def describe_kind(mode: int) -> str | None:
    """What a path is that is no regular file, by its st_mode; None for a regular file."""
    if stat.S_ISREG(mode):
        return None
    return next((kind for matches, kind in _KINDS if matches(mode)), "no regular file")


def describe_os_error(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "there is no such file, or it is a broken link"
    return error.strerror or first_line(error)


def _check_regular(status: os.stat_result) -> None:
    kind = describe_kind(status.st_mode)
    if kind is not None:
        raise UnreadableError(f"it is {kind}", "give a regular file")


def _open(content: bytes, limits: ReadLimits) -> Image.Image:
    """The image with its header read, not decoded."""
    limits.check_bytes(len(content))
    bound = Image.MAX_IMAGE_PIXELS  # Pillow refuses twice as many pixels
    if bound is not None and limits.max_pixels > 2 * bound:
        Image.MAX_IMAGE_PIXELS = limits.max_pixels
    try:
        return Image.open(io.BytesIO(content), formats=_formats())
    except Image.DecompressionBombError:
        raise UnreadableError(f"it has more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels", _SHRINK) from None


def _to_rgb(image: Image.Image, form: str | None) -> Image.Image:
    mode = image.mode
    if mode in _CONVERTIBLE:
        return image.convert("RGB")
    if mode == "F":
        raise UnreadableError("its pixels are floating-point numbers", "convert it to 8 or 16 bits")
    if mode != "I" and not mode.startswith("I;16"):
        raise UnreadableError(f"its color mode {mode} is not supported", "convert it to RGB")
    values = np.asarray(image).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    # a TIFF of 32 bits has no known range: 255 may be white
    if low < 0 or high > 0xFFFF or (mode == "I" and form == "TIFF" and 0 < high <= 0xFF):
        raise UnreadableError(f"its pixels are integers from {low} to {high}", "convert it to 8 or 16 bits")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")


@cache
def _formats() -> list[str]:
    """The formats that this Pillow knows; the first call also silences libtiff."""
    Image.init()
    _silence_libtiff()
    return [name for name in _FORMATS if name in Image.OPEN]


def _silence_libtiff() -> None:
    """Keep libtiff from printing on stderr: for damaged files it does so once per line of pixels.

    Pillow offers no switch. Where the library is not found under its name, it goes on printing.
    """
    with suppress(OSError, AttributeError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        for path in {line.split(maxsplit=5)[-1] for line in lines if "libtiff" in line}:
            library = ctypes.CDLL(path)
            for setter in (library.TIFFSetErrorHandler, library.TIFFSetWarningHandler):
                setter.restype, setter.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
                setter(None)


class _Decoding(threading.local):
    """Whether this thread decodes an image; as part of a filter, it matches the warnings that Pillow gives meanwhile.

    `warnings.catch_warnings` would change the filters of all threads, and let other warnings appear once per image.
    """

    active = False

    def match(self, module: str) -> bool:
        return self.active and module.partition(".")[0] in ("PIL", "mctf")

    def __enter__(self) -> None:
        if warnings.filters[:1] != [_NO_PILLOW_WARNINGS]:
            warnings.filters.insert(0, _NO_PILLOW_WARNINGS)  # type: ignore[attr-defined]
        self.active = True

    def __exit__(self, *exception: object) -> None:
        self.active = False


_decoding = _Decoding()
_NO_PILLOW_WARNINGS: Any = ("ignore", None, Warning, _decoding, 0)
