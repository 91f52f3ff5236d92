"""The package as it is installed: its files, its dependencies, and the command without and with the extra `demo`.

A virtual environment gets the wheel, and links to the distributions that its metadata require, taken from the
environment of the tests. Nothing else can be imported there, and nothing is downloaded.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = ("matplotlib", "skimage", "tensorboard", "transformers", "datasets")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with sdist and wheel, built without network from a copy of the sources."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    check([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--sdist"], cwd=folder)
    return folder / "dist"


def check(command: list[object], *, cwd: Path) -> str:
    """The output of a command that succeeds, run without the variables that would show it the sources."""
    result = run(command, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run(command: list[object], *, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)


def wheel_of(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def data_files(names: Iterable[str]) -> set[str]:
    """Files of the package that are no code."""
    return {name for name in names if name.startswith("mctf/") and not name.endswith((".py", ".pyc", "/"))}


def expected_files() -> set[str]:
    paths = (path for path in (ROOT / "src").rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    files = data_files(str(path.relative_to(ROOT / "src")) for path in paths)
    assert {"mctf/py.typed", "mctf/models/weights/embedded.safetensors", "mctf/data_files/paper_tables.json"} <= files
    return files


def test_a_wheel_holds_all_data(dist: Path) -> None:
    with zipfile.ZipFile(wheel_of(dist)) as wheel:
        assert data_files(wheel.namelist()) == expected_files()
        weights = wheel.read("mctf/models/weights/embedded.safetensors")
    assert weights == (ROOT / "src/mctf/models/weights/embedded.safetensors").read_bytes()


def test_an_sdist_holds_all_data(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = [member.name for member in sdist.getmembers() if member.isfile()]
    assert data_files(name.partition("/src/")[2] for name in names) == expected_files()


def requirements(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(archive.read(name).decode())
    return [Requirement(line) for line in headers.get_all("Requires-Dist", [])]


def closure(wheel: Path, extras: set[str]) -> dict[str, metadata.Distribution]:
    """The installed distributions that pip would install for the wheel with these extras, by name."""
    own, installed = requirements(wheel), {}
    pending, seen = [("mctf", extra) for extra in {"", *extras}], set()
    while pending:
        name, extra = pending.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        if name == "mctf":
            needed = own
        else:
            installed[name] = metadata.distribution(name)
            needed = [Requirement(line) for line in installed[name].requires or []]
        for requirement in needed:
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                pending += [(canonical(requirement.name), wanted) for wanted in {"", *requirement.extras}]
    return installed


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def test_the_base_requirements_bring_no_optional_package(dist: Path) -> None:
    base = closure(wheel_of(dist), set())
    assert {"torch", "timm", "safetensors", "click", "rich"} <= set(base)
    assert base.keys().isdisjoint({"matplotlib", "scikit-image", "tensorboard", "transformers", "datasets", "pytest"})
    demo = set(closure(wheel_of(dist), {"demo", "playground"}))
    assert {"scikit-image", "gradio", "jinja2"} <= demo
    assert "matplotlib" not in demo
    assert {"tensorboard", "tomli-w"} <= set(closure(wheel_of(dist), {"train"}))
    development = closure(wheel_of(dist), {"dev"})  # it refers to the other extras by mctf[...]
    assert {"tensorboard", "matplotlib", "scikit-image", "transformers", "import-linter"} <= set(development)


def test_every_dependency_of_development_is_pinned(dist: Path) -> None:
    """But those of torch for CUDA, which torch pins itself."""
    pins = {canonical(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().split()}
    needed = {name for name in closure(wheel_of(dist), {"dev"}) if not name.startswith(("nvidia-", "cuda-"))}
    assert needed - pins == set()


def make_environment(folder: Path, wheel: Path, extras: set[str]) -> Path:
    """The folder of commands of a virtual environment with the wheel and links to its requirements."""
    check([sys.executable, "-m", "venv", "--without-pip", folder], cwd=folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    for distribution in closure(wheel, extras).values():
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            link = site / top
            if not link.is_symlink():  # namespaces, such as nvidia, belong to several distributions
                link.symlink_to(distribution.locate_file(top))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "--disable-pip-version-check"]
    check([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], cwd=folder.parent)
    return folder / "bin"


@pytest.fixture(scope="module")
def base(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("base") / "venv", wheel_of(dist), set())


@pytest.mark.slow
def test_the_library_fuses_a_model_without_extras(base: Path, tmp_path: Path) -> None:
    code = f"""
from importlib.util import find_spec
import mctf, timm, torch
assert mctf.__file__.startswith({str(base.parent)!r}), mctf.__file__
assert not any(find_spec(name) for name in {OPTIONAL})
model = mctf.fuse(timm.create_model("test_vit").eval(), r=8)
print(tuple(model(torch.zeros(2, 3, 160, 160)).shape))
"""
    assert check([base / "python", "-c", code], cwd=tmp_path).strip() == "(2, 1000)"


@pytest.mark.slow
def test_every_module_imports_without_extras(base: Path, tmp_path: Path) -> None:
    code = """
import importlib, pkgutil, mctf
names = {module.name for module in pkgutil.walk_packages(mctf.__path__, "mctf.")}
names -= {"mctf.__main__", "mctf.hosts.open_clip", "mctf.kernels.cpu"}  # the last two only beside open_clip and Numba
print(len([importlib.import_module(name) for name in names]))
"""
    assert int(check([base / "python", "-c", code], cwd=tmp_path)) > 100


@pytest.mark.slow
def test_the_command_plans_without_extras(base: Path, tmp_path: Path) -> None:
    assert "GFLOPs" in check([base / "mctf", "plan", "embedded", "-r", "8"], cwd=tmp_path)


@pytest.mark.slow
def test_the_demo_names_its_extra(base: Path, tmp_path: Path) -> None:
    result = run([base / "mctf", "demo"], cwd=tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "pip install 'mctf[demo]'" in line


@pytest.mark.nightly
@pytest.mark.slow
def test_the_demo_runs_with_its_extra(dist: Path, tmp_path: Path) -> None:
    commands = make_environment(tmp_path / "venv", wheel_of(dist), {"demo"})
    output = check([commands / "mctf", "demo", "--batch", "1", "--rounds", "1", "-o", tmp_path / "out"], cwd=tmp_path)
    assert "images/s" in output
    assert (tmp_path / "out/fused.png").stat().st_size > 10_000
