"""Small generated images, in folders and zip files."""

import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image


def make_picture(seed: int, *, width: int = 48, height: int = 40) -> Image.Image:
    """A smooth random image per seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encode(picture: Image.Image, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form)
    return buffer.getvalue()


def write_folder(folder: Path, *names: str) -> Path:
    """A folder with one image per name; its seed is the position in the list."""
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(make_picture(seed), "JPEG" if path.suffix.lower() in (".jpg", ".jpeg") else "PNG"))
    return folder


def zip_folder(folder: Path, archive: Path) -> Path:
    """The same files in an uncompressed zip file, with entries for folders as many tools write them."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
        for path in sorted(folder.rglob("*")):
            file.write(path, path.relative_to(folder))
    return archive
