"""What the experiments that draw have in common: which images, on what grid, and files that a browser shows."""

import io
from pathlib import Path

from PIL import Image

from ...analysis.reproduction.experiment import Subject
from ...errors import MctfError
from ...hosts import find_host
from ...writing import write_bytes
from ..pictures import patch_grid

_SIDE = 448  # pixels of a picture, about
_QUALITY = 80


def grid_of(subject: Subject) -> tuple[int, int]:
    """Rows and columns of patches; raises MctfError where patches form no grid of squares."""
    architecture = find_host(subject.model).architecture(subject.preprocessing.image_size)
    height, width = subject.preprocessing.image_size
    return patch_grid(architecture.tokens - architecture.protected, height=height, width=width)


def no_grid(subject: Subject) -> str | None:
    """Why nothing can be drawn; None where it can."""
    try:
        grid_of(subject)
    except MctfError as failure:
        return str(failure)
    return None


def scale_of(subject: Subject) -> int:
    """Pixels of a picture a pixel of the image."""
    return max(1, round(_SIDE / max(subject.preprocessing.image_size)))


def save(picture: Image.Image, folder: Path, name: str) -> str:
    """Write a picture as a small file that every browser shows, and give its name."""
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=_QUALITY)
    write_bytes(folder / f"{name}.webp", buffer.getvalue())
    return f"{name}.webp"
