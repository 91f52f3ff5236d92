"""What an installed package holds beside its code: the files that the code reads, and no others."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = "from setuptools.build_meta import build_sdist, build_wheel; build_wheel('dist'); build_sdist('dist')"
EXPECTED = {
    "mctf/data_files/paper_tables.json",
    "mctf/data_files/tiny_imagenet_classes.tsv",
    "mctf/models/weights/embedded.safetensors",
    "mctf/reproduce/templates/macros.html.j2",
    "mctf/reproduce/templates/page.css",
    "mctf/reproduce/templates/page.html.j2",
    "mctf/reproduce/templates/page.js",
    "mctf/reproduce/templates/report.md.j2",
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with wheel and sdist, built without network from copies of the sources."""
    pytest.importorskip("setuptools", minversion="77", reason="a package is built by setuptools 77 or later")
    place = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    subprocess.run([sys.executable, "-c", BUILD], cwd=place, check=True, capture_output=True)
    return place / "dist"


def data_files(names: Iterable[str]) -> set[str]:
    """Files of the package that are no code."""
    return {name for name in names if name.startswith("mctf/") and not name.endswith((".py", "/"))}


def test_a_wheel_holds_all_data(dist: Path) -> None:
    (path,) = dist.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        assert data_files(wheel.namelist()) == EXPECTED
        weights = wheel.read("mctf/models/weights/embedded.safetensors")
    assert weights == (ROOT / "src/mctf/models/weights/embedded.safetensors").read_bytes()


def test_an_sdist_holds_all_data(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = [member.name for member in sdist.getmembers() if member.isfile()]
    inside = [name.partition("/src/")[2] for name in names]
    assert data_files(inside) == EXPECTED
