"""Small pictures made up on the spot, in folders and zip files."""

import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image


def make_picture(seed: int, *, width: int = 48, height: int = 40) -> Image.Image:
    """Coloured blotches, another set for every seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encode(picture: Image.Image, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form)
    return buffer.getvalue()


def write_folder(folder: Path, *names: str) -> Path:
    """A folder with a picture under each name, another one for every place in the list."""
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(make_picture(seed), "JPEG" if path.suffix.lower() in (".jpg", ".jpeg") else "PNG"))
    return folder


def zip_folder(folder: Path, archive: Path) -> Path:
    """The same files in a zip file, not compressed, with entries for the folders as many tools write them."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
        for path in sorted(folder.rglob("*")):
            file.write(path, path.relative_to(folder))
    return archive
