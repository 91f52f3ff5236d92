"""The built wheel on every supported Python, and with the lowest versions that pyproject.toml admits.

    python tests/repo/release_check.py                        # every supported Python, then the lowest versions
    python tests/repo/release_check.py --only 3.12,lowest --folder build/release
    python tests/repo/release_check.py --skip 3.13            # without what this machine lacks
    python tests/repo/release_check.py --print-lowest         # the constraints file of the lowest versions

`make release-check` builds the files in `dist` before it. Each environment is a fresh one with the wheel and its extras
(some 6 GB, with PyTorch for CUDA), and is removed after its smoke test, unless --folder names a place to keep it. The
exit code is 0 only if everything was checked that --skip does not name.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = ("3.11", "3.12", "3.13")
CHECKS = (*SUPPORTED, "lowest")
EXTRAS = ("train", "report", "hf", "demo", "cpu", "export", "embed", "playground")
TEST_TOOLS = ("pytest", "hypothesis", "fvcore")
TESTS = (
    "tests/core/test_matching.py",
    "tests/core/test_assignment.py",
    "tests/test_budgets.py",
    "tests/test_planning.py",
)
FUSE = """
import sys, mctf, mctf.models, timm, torch, transformers
assert sys.prefix in mctf.__file__, mctf.__file__
model = timm.create_model("embedded", pretrained=True).eval()
images = torch.zeros(2, *model.pretrained_cfg["input_size"])
with torch.inference_mode():
    baseline = model(images)
    for method in ("mctf", "ward", "tome"):
        fused = mctf.fuse(model, method, flops=0.56)(images)
        assert fused.shape == baseline.shape and fused.isfinite().all()
        assert torch.equal(mctf.unfuse(model)(images), baseline)
print(f"  torch {torch.__version__}, timm {timm.__version__}, transformers {transformers.__version__}")
"""
PAGE = """
import torch
from mctf.models.loading import create
from mctf.viz.playground import build, serve
page = build({"test_vit": create("test_vit")}, device=torch.device("cpu"), rounds=1)
print(serve(page, wait=False))
page.close()
"""


class CheckFailedError(Exception):
    """A command of a check failed."""


def lowest(project: dict[str, object], extras: Iterable[str]) -> list[str]:
    """NAME==VERSION of each dependency of the project and of its extras, with the version after its >=."""
    optional = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    bounds = {}
    for requirement in map(Requirement, lines):
        if requirement.name == project["name"]:
            continue
        versions = [each.version for each in requirement.specifier if each.operator == ">="]
        if len(versions) != 1:
            raise SystemExit(f"{requirement} has no lower bound: write {requirement.name}>=VERSION")
        if bounds.setdefault(requirement.name, versions[0]) != versions[0]:
            raise SystemExit(f"{requirement.name} has two lower bounds: {bounds[requirement.name]} and {versions[0]}")
    return [f"{name}=={version}" for name, version in sorted(bounds.items())]


def find_interpreters() -> dict[str, Path | None]:
    """An interpreter of each supported version that runs: this one, one of PATH or of pyenv; None where none does."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[str, Path | None] = {}
    for version in SUPPORTED:
        on_path = shutil.which(f"python{version}")
        candidates = [Path(sys.executable), *([Path(on_path)] if on_path else [])]
        candidates += sorted(pyenv.glob(f"{version}.*/bin/python"))
        found[version] = next((path for path in candidates if version_of(path) == version), None)
    return found


def version_of(interpreter: Path) -> str | None:
    """Its version as 3.12, or None where it does not run, as a shim of pyenv for a version that is not active."""
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    result = subprocess.run([interpreter, "-c", code], capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None


def run(*command: object, cwd: Path) -> None:
    """Runs a command without variables that would show it other packages; its output appears where it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, stderr=subprocess.STDOUT, stdout=-1)
    text = result.stdout.decode(errors="replace")
    if result.returncode != 0:
        line = " ".join(map(str, command))
        raise CheckFailedError(f"{line}\nfailed with exit code {result.returncode}:\n{text[-4000:]}")
    for line in text.splitlines():
        if line.startswith("  torch") or " passed" in line:
            print(line, flush=True)


def install_and_test(name: str, interpreter: Path, wheel: Path, constraints: Path, folder: Path) -> None:
    """A fresh environment with the wheel: import, fuse, plan, demo, playground, export, embed, tests of the core."""
    print(f"{name}: {interpreter}", flush=True)
    folder.mkdir(parents=True)
    run(interpreter, "-m", "venv", folder / "venv", cwd=folder)
    commands = folder / "venv/bin"
    pip = [commands / "python", "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    run(*pip, "-c", constraints, f"{wheel}[{','.join(EXTRAS)}]", *TEST_TOOLS, cwd=folder)
    run(commands / "python", "-c", FUSE, cwd=folder)
    run(commands / "mctf", "plan", "embedded", "--flops", "0.56", "--method", "ward", cwd=folder)
    run(commands / "mctf", "demo", "--json", "--batch", "1", "--rounds", "1", "--output", folder / "demo", cwd=folder)
    run(commands / "python", "-c", PAGE, cwd=folder)
    exported = folder / "embedded.onnx"
    run(commands / "mctf", "export", "embedded", "-m", "mctf_exact", "-r", "fast", "--output", exported, cwd=folder)
    embed = ("embed", "embedded", "--data", folder / "demo", "--output", folder / "vectors")
    run(commands / "mctf", *embed, cwd=folder)
    options = ["-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", "-q", "-m", "not slow"]
    run(commands / "python", "-m", "pytest", *options, *TESTS, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names, help=f"some of {', '.join(CHECKS)}, with commas between")
    parser.add_argument("--skip", type=names, default=set(), help="what need not be checked, in the same form")
    parser.add_argument("--folder", type=Path, help="where environments are made and kept")
    parser.add_argument("--print-lowest", action="store_true", help="print the lowest versions and stop")
    arguments = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = "\n".join(lowest(project, EXTRAS)) + "\n"
    if arguments.print_lowest:
        print(pins, end="")
        return
    wheels = sorted((ROOT / "dist").glob("mctf-*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"expected one wheel in dist, found {len(wheels)}: run make release-check")

    oldest = SUPPORTED[0]
    assert SpecifierSet(project["requires-python"]).contains(oldest)
    interpreters = find_interpreters() | {"lowest": None}
    interpreters["lowest"] = interpreters[oldest]
    wanted = [name for name in CHECKS if name in (arguments.only or CHECKS) and name not in arguments.skip]
    missing = [name for name in wanted if interpreters[name] is None]
    with tempfile.TemporaryDirectory(prefix="mctf-release-") as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        lowest_file = Path(temporary) / "lowest.txt"
        lowest_file.write_text(pins)
        failed = []
        for name in (name for name in wanted if name not in missing):
            constraints = lowest_file if name == "lowest" else ROOT / "constraints.txt"
            try:
                install_and_test(name, interpreters[name], wheels[0], constraints, folder / name)
            except CheckFailedError as failure:
                print(f"{name}: {failure}", flush=True)
                failed.append(name)
            if arguments.folder is None:
                shutil.rmtree(folder / name)
    report(wanted, failed=failed, missing=missing)


def names(text: str) -> set[str]:
    """The checks of an option."""
    found = set(text.split(","))
    if unknown := found - set(CHECKS):
        raise argparse.ArgumentTypeError(f"expected {', '.join(CHECKS)}, got {', '.join(sorted(unknown))}")
    return found


def report(wanted: Sequence[str], *, failed: Sequence[str], missing: Sequence[str]) -> None:
    """What passed; the exit code is 1 for a failure, and 2 where something was not checked."""
    passed = [name for name in wanted if name not in (*failed, *missing)]
    print(f"passed: {', '.join(passed) or 'none'}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    if missing:
        needed = {"lowest": SUPPORTED[0]}
        which = ", ".join(f"{name} (Python {needed.get(name, name)})" for name in missing)
        print(f"not checked, their interpreter is not here: {which}; install it, or --skip {','.join(missing)}")
    if failed or missing or not passed:
        raise SystemExit(1 if failed else 2)


if __name__ == "__main__":
    main()
