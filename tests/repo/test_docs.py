"""Documents name files, functions, tests and commands that exist."""

import ast
import re
import runpy
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from mctf.cli import group
from mctf.errors import MctfError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"`((?:src|tests|docs|benchmarks|examples|recipes)/[\w./-]+)`")
MAKE = re.compile(r"(?:^|`|\s{4}|run: )make ((?:[a-z-]+ ?)+)", re.MULTILINE)
FUNCTION = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
TEST = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")


def broken_paths(document: Path, text: str) -> list[str]:
    """Links and paths of a document that lead to no file."""
    links = [link for link in LINK.findall(text) if "://" not in link and not link.startswith("mailto:")]
    targets = [(link, document.parent / link) for link in links]
    targets += [(path, ROOT / path) for path in PATH.findall(text)]
    return [name for name, target in targets if not target.exists()]


@cache
def definitions(path: Path) -> frozenset[str]:
    """Names defined in a file: functions, classes, and `Class.method`."""
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        if isinstance(node, ast.ClassDef):
            names += [f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)]
    return frozenset(names)


def broken_references(text: str) -> list[str]:
    """References of the paper map to functions below src/mctf and tests below tests that are not there."""
    functions = [(ROOT / "src/mctf" / path, name) for path, name in FUNCTION.findall(text)]
    tests = [(ROOT / "tests" / path, name) for path, name in TEST.findall(text)]
    assert len(functions) > 15
    assert len(tests) > 15
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path, name in functions + tests
        if not path.exists() or (name and name not in definitions(path))
    ]


def refused_commands(text: str) -> list[str]:
    """Commands in the code blocks of a document that the command line does not take; … stands for what is left out."""
    lines = re.findall(r"^ {4,}(mctf [a-z].*)$", re.sub(r"\\\n {4}", "", text), flags=re.MULTILINE)
    refused = []
    for line in lines:
        name, *words = shlex.split(line, comments=True)[1:]
        command = group.get_command(click.Context(group), name)
        try:
            if "…" not in line and command is not None:
                command.make_context(name, words)
        except (click.ClickException, MctfError):
            command = None
        except click.exceptions.Exit:  # --help
            pass
        refused += [line] if command is None else []
    return refused


def long_sentences(text: str) -> list[str]:
    """Sentences of paragraphs that are longer than two lines of 120 characters; links count as their words."""
    prose = re.sub(r"```.*?```|^(?: {4}|[|#!]).*$", "", text, flags=re.DOTALL | re.MULTILINE)
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n- ", prose)]
    words = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", part) for part in paragraphs]
    return [each for part in words for each in re.split(r"(?<=[.!?:]) ", part) if len(each) > 240]


def test_the_readme_is_one_screen_and_a_half() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert long_sentences(text) == []
    pictures = re.findall(r"^!\[", text, flags=re.MULTILINE)
    assert len(pictures) == 2  # one of fused patches, one plot


def test_a_long_sentence_is_noticed() -> None:
    sentence = "A sentence that " + "goes on and " * 20 + "ends."
    assert long_sentences(f"Short.\n{sentence}\n\n    {sentence}\n| {sentence} |") == [sentence]


def test_every_number_of_the_readme_table_is_in_the_documents() -> None:
    """Images/s and speed-ups of the README stand in a page or a result file that has their command."""
    rows = re.findall(r"^\|.*\d\u00d7 \|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert len(rows) == 6
    pages = (ROOT / "docs/performance.md").read_text() + (ROOT / "docs/deploy.md").read_text()
    factors = [factor for row in rows for factor in re.findall(r"([\d.]+)\u00d7", row)]
    assert len(factors) == 6
    assert [factor for factor in factors if factor not in pages] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_paths_lead_to_files(document: Path) -> None:
    assert broken_paths(document, document.read_text()) == []


def test_a_broken_link_is_noticed() -> None:
    text = "[here](nowhere.md#a), [there](../README.md) and `src/mctf/nothing.py`"
    assert broken_paths(ROOT / "docs/page.md", text) == ["nowhere.md", "src/mctf/nothing.py"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_are_taken(document: Path) -> None:
    assert refused_commands(document.read_text()) == []


def test_a_wrong_option_is_noticed() -> None:
    lines = ["mctf bench deit --formats onnx", "mctf bench deit \\\n        --rounds x", "mctf benchmark deit"]
    text = "\n".join(f"    {line}" for line in ["mctf bench deit --format onnx  # fast", *lines])
    assert len(refused_commands(text)) == 3


def test_the_paper_map_names_functions_and_tests_that_exist() -> None:
    assert broken_references((ROOT / "docs/paper_map.md").read_text()) == []


def test_every_tool_in_the_ecosystem_table_names_a_test_that_exists() -> None:
    rows = [line for line in (ROOT / "docs/ecosystem.md").read_text().splitlines() if line.count("|") == 6][2:]
    assert len(rows) > 15
    for row in rows:
        ((path, name),) = TEST.findall(row.split("|")[5])
        assert not name or name in definitions(ROOT / "tests" / path), row
        assert (ROOT / "tests" / path).exists(), row


def test_a_renamed_function_is_noticed() -> None:
    text = (ROOT / "docs/paper_map.md").read_text()
    changed = text.replace("core/attention.py: attend`", "core/attention.py: attended`", 1)
    assert changed != text
    assert broken_references(changed) == ["src/mctf/core/attention.py: attended"]


def test_commands_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"test", "test-all", "check", "wheel", "coverage"} <= targets
    files = [*DOCUMENTS, ROOT / ".ci/run", ROOT / ".github/workflows/ci.yml"]
    named = {word for file in files for words in MAKE.findall(file.read_text()) for word in words.split()}
    assert {"check", "test-all"} <= named <= targets


def test_every_extra_is_named_correctly() -> None:
    """`mctf[EXTRA]` in documents and messages is an extra of pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [*DOCUMENTS, *(ROOT / "src").rglob("*.py")]
    named = {name for file in files for name in re.findall(r"mctf\[([a-z]+)\]", file.read_text())}
    assert {"demo", "hf"} <= named <= set(extras)


def test_the_table_over_formats_is_that_of_the_result_files() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks/performance_page.py"))
    text = (ROOT / "docs/deploy.md").read_text()
    runs = script["read_formats"](ROOT / "benchmarks/results")
    assert script["make_deploy_page"](text, runs) == text, "run make docs"
    assert all(name not in run["command"] for run in runs for name in ("/home/", "/root/", "/tmp/", "/work/"))

    def row(fusion: str, format: str, precision: str, milliseconds: float, speedup: float) -> dict[str, Any]:
        name = f"{fusion}, {format}" + ("" if precision == "fp32" else f", {precision}")
        facts = {"name": name, "format": format, "precision": precision, "batch": 8, "spread": 0.02}
        return facts | {"milliseconds": milliseconds, "speedup": speedup}

    rows = [row("unfused", "torch", "fp32", 40, 1), row("ward, flops=0.56", "torch", "fp32", 25, 1.6)]
    rows += [row("unfused", "onnx", "fp32", 30, 1), row("unfused", "onnx", "int8", 20, 1.5)]
    table = {"title": "deit_small_patch16_224, batch 8, cpu", "rows": rows, "notes": ["ward, onnx is left out: why"]}
    run = {"device": "cpu (x86_64, 2 threads)", "rounds": 9, "command": "mctf bench deit", "tables": [table]}
    page = script["make_deploy_page"](text, [run])
    for line in (
        "| | torch | onnx |",
        "| deit_small, batch 8, unfused | 40.0 | 30.0 |",
        "| deit_small, batch 8, ward, flops=0.56 | 25.0 (1.60x) | - |",
        "| deit_small, batch 8, unfused, int8 | - | 20.0 (1.50x) |",
        "deit_small: ward, onnx is left out: why.",
        "    mctf bench deit",
    ):
        assert line in page.splitlines()


def test_the_performance_table_is_that_of_the_result_files() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks/performance_page.py"))
    text = (ROOT / "docs/performance.md").read_text()
    tables = script["read_tables"](ROOT / "benchmarks/results")
    assert script["make_page"](text, tables) == text, "run make docs"
    tables[0]["rows"]["mctf_exact"]["milliseconds"] += 1
    assert script["make_page"](text, tables) != text
