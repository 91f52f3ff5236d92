"""The scripts of the tutorials run, and each page includes its script."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import skimage

from helpers.families.own import EXAMPLES

ROOT = EXAMPLES.parent
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
PHOTOGRAPHS = Path(skimage.__file__).parent / "data"
EXPECTED = {  # what a script prints when it did what its page says
    "fuse.py": r"restored bit for bit: True\n(?s:.*)0\.71 GFLOPs of 1\.26 \(44% saved\)",
    "choose_budget.py": r"ward +78%(?s:.*)tome +56%",
    "finetune.py": r"step 3: loss (?s:.*)classes 0 and 1 are answered \[0, 1\] fused",
    "embed.py": r"cat left +nearest: cat right\ncat right +nearest: cat left\n",
    "own_method.py": r"tokens per block: \[\d+(, \d+)+\]",
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


@pytest.mark.nightly
@pytest.mark.slow
def test_the_tune_script(tmp_path: Path) -> None:
    photos, commands = tmp_path / "photos", tmp_path / "bin"
    for folder in (photos, commands):
        folder.mkdir()
    for name in ("chelsea.png", "coffee.png"):
        shutil.copy(PHOTOGRAPHS / name, photos)
    (commands / "mctf").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mctf "$@"\n')
    (commands / "mctf").chmod(0o755)
    script = [shutil.which("bash"), EXAMPLES / "tune.sh", photos, tmp_path, "embedded_small"]
    # exec of env keeps the environment of the tests, with the command first on the path
    environment = ["env", f"PATH={commands}:/usr/bin:/bin", "OMP_NUM_THREADS=1"]
    result = subprocess.run([*environment, *script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "schedule.json").is_file()
    assert "schedule.json" in result.stdout


def test_every_script_is_tested() -> None:
    tested = {*EXPECTED, "export.py", "tune.sh", "own_host.py", "own_vit.py", "onnx_classify.py"}
    tested |= {"embed_ray.py", "embed_daft.py"}  # need Ray and Daft
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == tested
