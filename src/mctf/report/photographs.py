"""Photographs that come with scikit-image, for a demo with nothing to download.

They are plain files inside the installed package, so they are found without importing it. All four may be
copied freely (public domain or CC0).
"""

from importlib.util import find_spec
from pathlib import Path

from ..errors import MctfError

_FILES = ("chelsea.png", "coffee.png", "rocket.jpg", "astronaut.png")


def photographs() -> list[Path]:
    """A cat, a cup of coffee, a rocket and an astronaut, as image files."""
    spec = find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise MctfError("the demo's photographs come with scikit-image: run pip install 'mctf[demo]'")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise MctfError(
            f"scikit-image came without {', '.join(missing)}: run pip install --force-reinstall scikit-image"
        )
    return [folder / name for name in _FILES]
