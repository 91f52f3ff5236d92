"""The documentation site: it builds without warnings, loads nothing from other hosts, and has every public name."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import mctf
from mctf.errors import MctfError

ROOT = Path(__file__).resolve().parents[2]
LOADS = re.compile(
    r"<(?:script|link|img|iframe|source|video|use)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)"
)
IMPORTS = re.compile(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)")


def loads_from_elsewhere(folder: Path) -> list[str]:
    """What the pages and style sheets of a folder fetch from another host."""
    pages = [found for path in folder.rglob("*.html") for found in LOADS.findall(path.read_text())]
    return pages + [found for path in folder.rglob("*.css") for found in IMPORTS.findall(path.read_text())]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    return folder


@pytest.mark.slow
def test_it_loads_nothing_from_other_hosts(site: Path) -> None:
    assert loads_from_elsewhere(site) == []


@pytest.mark.slow
def test_tutorials_show_their_scripts(site: Path) -> None:
    for page in (site / "tutorials").glob("*.html"):
        assert "--8&lt;--" not in page.read_text(), page
    assert "restored bit for bit" in (site / "tutorials/fuse.html").read_text()


@pytest.mark.slow
def test_files_outside_of_docs_are_in_the_site(site: Path) -> None:
    assert 'href="source/examples/own_host.py.html"' in (site / "adding_a_host.html").read_text()
    assert "class OwnHost" in re.sub(r"<[^>]+>", "", (site / "source/examples/own_host.py.html").read_text())
    assert (site / "source/benchmarks/results/tiny_imagenet.png").is_file()
    assert 'href="models.html"' in (site / "CONTRIBUTING.html").read_text()


@pytest.mark.slow
def test_parameters_are_lists(site: Path) -> None:
    assert "<li><code>flops</code>: in place of r" in re.sub(r"<p>|\n", "", (site / "api.html").read_text())


def test_a_load_from_elsewhere_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        '<a href="https://a.example/"></a><script src="https://b.example/x.js"></script>'
    )
    (tmp_path / "page.css").write_text("@import url(//c.example/font.css)")
    assert loads_from_elsewhere(tmp_path) == ["https://b.example/x.js", "//c.example/font.css"]


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs/api.md").read_text()
    listed = set(re.findall(r"^::: mctf\.(\w+)$", text, flags=re.MULTILINE))
    assert listed | {"methods"} == set(mctf.__all__)
    assert issubclass(mctf.MctfError, MctfError)


def test_links_are_adapted() -> None:
    pytest.importorskip("mkdocs")
    adapt = runpy.run_path(str(ROOT / "docs/_hooks.py"))["adapt_links"]
    text = "[a](../README.md) [b](../../examples/fuse.py) ![c](../images/fused.png#x) [d](../../benchmarks/results) [e](https://e.example)"
    assert adapt(text, ROOT / "docs/tutorials/page.md", "tutorials/page.md") == (
        "[a](../README.md) [b](../source/examples/fuse.py.md) ![c](../images/fused.png#x) d [e](https://e.example)"
    )
    assert adapt("[a](docs/data.md)", ROOT / "SECURITY.md", "SECURITY.md") == "[a](data.md)"
