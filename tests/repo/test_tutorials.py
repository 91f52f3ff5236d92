"""The scripts of the tutorials run, and each page includes its script."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import skimage
from pyarrow import parquet

from helpers.families.own import EXAMPLES

ROOT = EXAMPLES.parent
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
PHOTOGRAPHS = Path(skimage.__file__).parent / "data"
EXPECTED = {  # what a script prints when it did what its page says
    "fuse.py": r"restored bit for bit: True\n(?s:.*)0\.71 GFLOPs of 1\.26 \(44% saved\)",
    "choose_budget.py": r"(?:(?:ward|mctf|tome) +\d\d% +\d+\.\d{4} +\d+\.\d\dx\n){6}",  # finite numbers
    "finetune.py": r"step 3: loss \d+\.\d+, cross-entropy fused \d+\.\d+\n(?s:.*)0 and 1 are answered \[[01], [01]\]",
    "embed.py": r"cat left +nearest: cat right\ncat right +nearest: cat left\n",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_includes_the_script_that_it_links(page: Path) -> None:
    text = page.read_text()
    links = set(re.findall(r"\]\(\.\./\.\./(examples/[\w.]+)\)", text))
    included = re.findall(r'^--8<-- "(.*)"$', text, flags=re.MULTILINE)
    assert links, "a reader on a code host sees no included file, so the page links it"
    assert (page.stem == "index" and not included) or (len(included) == 1 and included[0] in links)
    assert all((ROOT / path).is_file() for path in links)


def test_the_index_lists_every_page() -> None:
    text = (ROOT / "docs/tutorials/index.md").read_text()
    assert [page.name for page in PAGES if page.stem != "index" and f"({page.name})" not in text] == []


@pytest.mark.parametrize("script", EXPECTED)
def test_a_script_does_what_its_page_says(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert re.search(EXPECTED[script], capsys.readouterr().out)


@pytest.mark.slow
def test_the_export_script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["export.py", str(tmp_path / "embedded.onnx")])
    runpy.run_path(str(EXAMPLES / "export.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert "logits of three images: (3, 200)" in output
    assert len(re.findall(r"batch \d: KL to the model", output)) == 2


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with two photographs."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("chelsea.png", "coffee.png"):
        shutil.copy(PHOTOGRAPHS / name, folder)
    return folder


@pytest.mark.slow
def test_the_tune_script(photos: Path, tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "mctf").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mctf "$@"\n')
    (commands / "mctf").chmod(0o755)
    output = check([shutil.which("bash"), EXAMPLES / "tune.sh", photos, tmp_path, "embedded_small"], first=commands)
    assert (tmp_path / "schedule.json").is_file()
    assert "schedule.json" in output


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "daft"])
def test_the_scripts_that_embed_on_a_cluster(engine: str, photos: Path, tmp_path: Path) -> None:
    if find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed: pip install {engine}")
    images = photos if engine == "ray" else f"{photos}/*.png"
    check([sys.executable, EXAMPLES / f"embed_{engine}.py", images, tmp_path / "vectors", "embedded_small"])
    table = parquet.read_table(tmp_path / "vectors")
    assert sorted(Path(path).name for path in table["path"].to_pylist()) == ["chelsea.png", "coffee.png"]
    vectors = np.array(table["embedding"].to_pylist())
    assert vectors.shape == (2, 128)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def check(command: list[object], *, first: Path | None = None) -> str:
    """What a program prints; it must succeed. first: a folder to look for programs before all others."""
    path = os.environ["PATH"] if first is None else f"{first}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_script_is_tested() -> None:
    tested = {*EXPECTED, "export.py", "tune.sh", "embed_ray.py", "embed_daft.py"}
    tested |= {"own_host.py", "own_vit.py"}  # tests/repo/test_examples.py
    tested |= {"own_method.py", "onnx_classify.py"}  # tests/methods/test_registry.py, tests/deploy/test_export.py
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == tested
