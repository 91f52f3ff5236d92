"""Documents name files, functions, tests and commands that exist."""

import ast
import json
import re
import runpy
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

import mctf
from mctf.cli import group
from mctf.errors import MctfError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"`((?:src|tests|docs|benchmarks|examples|recipes)/[\w./-]+)`")
MAKE = re.compile(r"(?:^|`|\s{4}|run: )make ((?:[a-z-]+ ?)+)", re.MULTILINE)
FUNCTION = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
PERFORMANCE_PAGE = runpy.run_path(str(ROOT / "benchmarks/performance_page.py"))
TITLE = PERFORMANCE_PAGE["TITLE"]
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


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_picture_has_the_tokens_of_the_method_in_its_caption(page: str) -> None:
    text = (ROOT / page).read_text()
    (numbers,) = re.findall(
        r"after blocks (\d+), (\d+) and (\d+): (\d+), (\d+) and (\d+) tokens are left of (\d+)", text
    )
    *blocks, first, second, third, tokens = map(int, numbers)
    assert "*`ward` at 56 % of the FLOPs." in text
    planned = mctf.plan("embedded", method="ward", flops=0.56)
    assert [planned.image_tokens, *(planned.token_counts[block] for block in blocks)] == [tokens, first, second, third]
    assert f"FIRST_PAGE_BLOCKS = ({', '.join(map(str, blocks))})" in (ROOT / "benchmarks/gallery.py").read_text()


@pytest.mark.parametrize("page", ["index", "playground", "gallery", "embedded"])
def test_the_first_pages_have_no_long_sentence(page: str) -> None:
    assert long_sentences((ROOT / f"docs/{page}.md").read_text()) == []


def test_a_long_sentence_is_noticed() -> None:
    sentence = "A sentence that " + "goes on and " * 20 + "ends."
    assert long_sentences(f"Short.\n{sentence}\n\n    {sentence}\n| {sentence} |") == [sentence]


RESULTS = ROOT / "benchmarks/results"
README_TABLE = (  # result file, and the contender of the row
    ("h200_deit_small_ward.json", "ward"),
    ("h200_deit_base_ward.json", "ward"),
    ("h200_vit_large_fp8.json", "ward"),
    ("h200_vit_large_fp8.json", "ward, fp8"),
    ("h200_deit_base_384_fast_batch64.json", "mctf_exact"),
    ("cpu2_deit_small_ward.json", "ward"),
)
MODELS = {"deit_small": "DeiT-S", "deit_base": "DeiT-B", "vit_large": "ViT-L"}
THREADS = {1: "one CPU thread", 2: "two CPU cores"}


def images_per_second(value: float) -> str:
    return f"{value:,.0f} images/s" if value >= 100 else f"{value:.1f} images/s"


def readme_row(facts: dict[str, Any], contender: str) -> str:
    """The row of the README's table of speeds, from a file of `mctf bench`."""
    (table,) = facts["tables"]
    setting = TITLE.match(table["title"]).groupdict()
    rows = {PERFORMANCE_PAGE["contender"](row): row for row in table["rows"]}
    (gpu,) = re.findall(r"NVIDIA (\w+)", facts["device"]) or (None,)
    device = f"{gpu}, bfloat16, compiled" if gpu else f"{cores(facts)}, float32"
    assert (facts["dtype"], facts["compiled"]) == (("bfloat16", "default") if gpu else ("float32", None))
    model = MODELS[re.sub(r"_patch16_\d+", "", setting["model"])]
    size = "" if setting["size"] == "224" else f" at {setting['size']} \u00d7 {setting['size']}"
    kind, amount = setting["amount"].split("=")
    how = (
        f"{100 * float(amount):.0f} % of the FLOPs"
        if kind == "flops"
        else amount
        if amount == "fast"
        else f"r={amount}"
    )
    speeds = [images_per_second(rows[name]["images_per_second"]) for name in ("baseline", contender)]
    method, _, precision = contender.partition(", ")
    what = f"{model}{size}, {setting['batch']} | `{method}`, {how}{precision and f', {precision}'}"
    return f"| {device} | {what} | {' | '.join(speeds)} | {rows[contender]['speedup']:.2f}\u00d7 |"


def cores(facts: dict[str, Any]) -> str:
    return THREADS[int(re.search(r"(\d+) threads?\)", facts["device"])[1])]


def onnx_row(folder: Path) -> str:
    """The README's row on ONNX Runtime, from a file of `mctf bench --format`."""
    facts = json.loads((folder / "cpu2_formats_deit_small.json").read_text())
    assert "--flops 0.56" in facts["command"]
    rows = {
        row["method"]: row
        for table in facts["tables"]
        for row in table["rows"]
        if (row["format"], row["precision"], row["batch"]) == ("onnx", "fp32", 8)
    }
    speeds = [images_per_second(rows[method]["images_per_second"]) for method in (None, "ward")]
    factor, device = f"{rows['ward']['speedup']:.2f}", cores(facts)
    cells = [f"{device}, ONNX Runtime", "DeiT-S, 8", "`ward`, 56 % of the FLOPs", *speeds, f"{factor}\u00d7"]
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def test_the_readme_table_is_that_of_the_result_files() -> None:
    """Rows below the first of a device leave it out."""
    text = (ROOT / "README.md").read_text()
    expected = [readme_row(json.loads((RESULTS / file).read_text()), contender) for file, contender in README_TABLE]
    expected.append(onnx_row(RESULTS))
    seen: set[str] = set()
    for index, row in enumerate(expected):
        device = row.split(" | ")[0]
        if device in seen:
            expected[index] = row.replace(device, "|", 1)
        seen.add(device)
    assert re.findall(r"^\|.*\d\u00d7 \|$", text, flags=re.MULTILINE) == expected
    small = json.loads((RESULTS / README_TABLE[0][0]).read_text())["tables"][0]["rows"]
    factors = {row["name"]: f"{row['speedup']:.2f}" for row in small}
    assert f"DeiT-S's {factors['ward']}\u00d7 a factor of {factors['baseline_matmul']} is" in text


def test_the_row_of_another_measurement_is_another(tmp_path: Path) -> None:
    facts = json.loads((RESULTS / "cpu2_deit_small_ward.json").read_text())
    before = readme_row(facts, "ward")
    facts["tables"][0]["rows"][1]["speedup"] += 0.1
    assert readme_row(facts, "ward") != before
    unfused = {
        "format": "onnx",
        "precision": "fp32",
        "batch": 8,
        "images_per_second": 20.0,
        "speedup": 1.0,
        "method": None,
    }
    rows = [unfused, unfused | {"method": "ward", "images_per_second": 34.0, "speedup": 1.7}]
    tables = [{"title": "deit_small_patch16_224, batch 8, cpu", "rows": rows}]
    measured = {"command": "mctf bench --flops 0.56", "device": "cpu (x86_64, AVX512, 2 threads)", "tables": tables}
    (tmp_path / "cpu2_formats_deit_small.json").write_text(json.dumps(measured))
    row = onnx_row(tmp_path)
    assert row.startswith("| two CPU cores, ONNX Runtime | DeiT-S, 8 | `ward`, 56 % of the FLOPs |")
    assert row.endswith("| 20.0 images/s | 34.0 images/s | 1.70\u00d7 |")


def test_the_tables_of_two_cpu_cores_are_those_of_the_result_files() -> None:
    page = (ROOT / "docs/performance.md").read_text()
    spreads = []
    for file, names, first in (
        ("cpu2_deit_small.json", ("mctf", "mctf_exact", "tome", "free_drop"), "r"),
        ("cpu2_deit_small_ward.json", ("ward", "mctf_exact", "free_drop"), "batch"),
    ):
        facts = json.loads((RESULTS / file).read_text())
        assert f"--output benchmarks/results/{file}" in page
        for table in facts["tables"]:
            rows = {row["name"]: row for row in table["rows"]}
            cells = [f"{rows[name]['milliseconds']:.0f} ({rows[name]['speedup']:.2f}x)" for name in names]
            start = rows[names[0]][first], f"{table['rows'][0]['milliseconds']:.0f}"
            assert "| " + " | ".join(map(str, [*start, *cells])) + " |" in page.splitlines()
            spreads += [100 * row["spread"] for row in table["rows"]]
    assert f"spreads of both files are {min(spreads):.0f} to {max(spreads):.0f} %" in page


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
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    files = [*DOCUMENTS, ROOT / ".ci/run", *workflows]
    named = {word for file in files for words in MAKE.findall(file.read_text()) for word in words.split()}
    assert {"check", "test-all"} <= named <= targets


def test_every_extra_is_named_correctly() -> None:
    """`mctf[EXTRA]` and `.[EXTRA]` in documents and messages are extras of pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [*DOCUMENTS, *(ROOT / "src").rglob("*.py")]
    lists = [names for file in files for names in re.findall(r"(?:mctf|\"\.)\[([a-z,]+)\]", file.read_text())]
    named = {name for names in lists for name in names.split(",")}
    assert {"demo", "hf"} <= named <= set(extras)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_package_is_installed_from_a_clone(document: Path) -> None:
    """Documents name what works before the package is on an index."""
    text = document.read_text()
    assert document.name == "CHANGELOG.md" or not re.search(r"pip install [\"']?mctf", text)


def test_the_table_over_formats_is_that_of_the_result_files() -> None:
    text = (ROOT / "docs/deploy.md").read_text()
    runs = PERFORMANCE_PAGE["read_formats"](ROOT / "benchmarks/results")
    assert PERFORMANCE_PAGE["make_deploy_page"](text, runs) == text, "run make docs"
    assert all(name not in run["command"] for run in runs for name in ("/home/", "/root/", "/tmp/", "/work/"))

    def row(fusion: str, format: str, precision: str, milliseconds: float, speedup: float) -> dict[str, Any]:
        name = f"{fusion}, {format}" + ("" if precision == "fp32" else f", {precision}")
        facts = {"name": name, "format": format, "precision": precision, "batch": 8, "spread": 0.02}
        return facts | {"milliseconds": milliseconds, "speedup": speedup}

    rows = [row("unfused", "torch", "fp32", 40, 1), row("ward, flops=0.56", "torch", "fp32", 25, 1.6)]
    rows += [row("unfused", "onnx", "fp32", 30, 1), row("unfused", "onnx", "int8", 20, 1.5)]
    table = {"title": "deit_small_patch16_224, batch 8, cpu", "rows": rows, "notes": ["ward, onnx is left out: why"]}
    run = {"device": "cpu (x86_64, AVX512, 2 threads)", "rounds": 9, "command": "mctf bench deit", "tables": [table]}
    page = PERFORMANCE_PAGE["make_deploy_page"](text, [run])
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
    text = (ROOT / "docs/performance.md").read_text()
    tables = PERFORMANCE_PAGE["read_tables"](ROOT / "benchmarks/results")
    assert PERFORMANCE_PAGE["make_page"](text, tables) == text, "run make docs"
    tables[0]["rows"]["mctf_exact"]["milliseconds"] += 1
    assert PERFORMANCE_PAGE["make_page"](text, tables) != text
    bound = {"milliseconds": 2.0, "gflops": 10.0}
    for gflops, shown in ((10.9, "+50% ward"), (11.1, "")):
        assert (
            PERFORMANCE_PAGE["overhead"]({"free_drop": bound, "ward": {"milliseconds": 3.0, "gflops": gflops}}) == shown
        )
