"""The import contracts in pyproject.toml: `make check` applies them to the package, these tests show that they fail."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_logo=True, cache_dir=None))"

LIBRARY_LAYERS = "Layers of the library"
LIBRARY_ALONE = "The library imports nothing of the workbench, nor what only the workbench needs"
WORKBENCH_LAYERS = "Layers of the workbench"
COMMAND_LINE = "Only the command line imports click and rich"
TRITON = "Only mctf.kernels imports the Triton kernels"


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """The package's modules as empty files, under the project's contracts."""
    for path in (ROOT / "src/mctf").rglob("*.py"):
        copy = tmp_path / path.relative_to(ROOT / "src")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    return tmp_path


def verdicts(folder: Path) -> dict[str, str]:
    """KEPT or BROKEN per contract; the exit status agrees."""
    result = subprocess.run([sys.executable, "-c", LINT], cwd=folder, capture_output=True, text=True)
    lines = [line.rsplit(" ", 1) for line in result.stdout.splitlines() if line.endswith((" KEPT", " BROKEN"))]
    assert lines, result.stdout + result.stderr
    contracts = dict(lines)
    assert result.returncode == ("BROKEN" in contracts.values())
    return contracts


def test_a_package_without_imports_keeps_every_contract(skeleton: Path) -> None:
    assert verdicts(skeleton) == dict.fromkeys(
        [LIBRARY_LAYERS, LIBRARY_ALONE, WORKBENCH_LAYERS, COMMAND_LINE, TRITON], "KEPT"
    )


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("methods/tome.py", "def run():\n    from .. import hosts", LIBRARY_LAYERS),
        ("methods/tome.py", "from mctf.train import engine", LIBRARY_ALONE),
        ("models/loading.py", "import matplotlib.pyplot", LIBRARY_ALONE),
        ("viz/plots.py", "from ..train import engine", WORKBENCH_LAYERS),
        ("evaluation/evaluate.py", "import click", COMMAND_LINE),
        ("methods/mctf.py", "from ..kernels.triton import matching", TRITON),
    ],
)
def test_a_forbidden_import_breaks_its_contract(skeleton: Path, module: str, statement: str, contract: str) -> None:
    path = skeleton / "mctf" / module
    assert path.exists()
    path.write_text(f"{statement}\n")
    broken = [name for name, verdict in verdicts(skeleton).items() if verdict == "BROKEN"]
    assert broken == [contract]


def test_an_indirect_import_breaks_the_contract_too(skeleton: Path) -> None:
    (skeleton / "mctf/methods/tome.py").write_text("from .. import tracing\n")
    (skeleton / "mctf/tracing.py").write_text("from . import viz\n")
    contracts = verdicts(skeleton)
    assert contracts[LIBRARY_LAYERS] == contracts[LIBRARY_ALONE] == "BROKEN"
