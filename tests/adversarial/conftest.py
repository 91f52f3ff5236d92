"""Bad input for every command and call: fixtures, the checks that every case makes, and the counts at the end.

A case is counted by the property `cases`: pairs of a group and a number, as in ("eval", 1).
"""

import os
import re
import shlex
import shutil
import signal
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.command_line import Command, Outcome
from helpers.images import write_folder, zip_folder
from mctf.cli import _COMMANDS
from mctf.models.loading import load_model
from mctf.schedule_file import Schedule

Files = dict[str, str]  # paths by the names that commands of the tables put into braces
_NAME = re.compile(r"\{([\w.]+)\}")
_SECONDS = 25


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Good and bad files, made once; no case may change them."""
    folder = tmp_path_factory.mktemp("files")
    images = write_folder(folder / "images", "a/0.png", "a/1.png", "b/0.png", "b/1.png")
    write_folder(folder / "loose", "0.png", "1.png")
    write_folder(folder / "mixed", "a/0.png", "1.png")
    write_folder(folder / "one_class", "a/0.png", "a/1.png")
    zip_folder(images, folder / "images.zip")
    state = load_model("embedded_small").state_dict()
    torch.save(state, folder / "weights.pt")
    torch.save(
        {name: value * torch.nan if value.is_floating_point() else value for name, value in state.items()},
        folder / "nan.pt",
    )
    torch.save({"state_dict": [1, 2, 3]}, folder / "list.pt")
    for name in ("empty_folder", "class_folders/a", "class_folders/b"):
        (folder / name).mkdir(parents=True)
    (folder / "empty").write_bytes(b"")
    (folder / "text.txt").write_text("not what it should be\n")
    (folder / "binary").write_bytes(bytes(range(256)) * 40)
    for suffix in (".png", ".onnx", ".xml", ".pt2"):
        (folder / f"binary{suffix}").write_bytes(bytes(range(256)) * 40)
    (folder / "empty.onnx").write_bytes(b"")
    (folder / "images.pt2").write_bytes((folder / "images.zip").read_bytes())
    (folder / "empty.png").write_bytes(b"")
    (folder / "half.png").write_bytes((images / "a" / "0.png").read_bytes()[:200])
    (folder / "half.zip").write_bytes((folder / "images.zip").read_bytes()[:500])
    (folder / "picture.png").write_bytes((images / "a" / "0.png").read_bytes())
    (folder / "classes.tsv").write_text("0\ta\tfirst\n1\tb\tsecond\n")
    (folder / "broken_link").symlink_to(folder / "nothing")
    (folder / "loop").symlink_to(folder / "loop")
    write_folder(folder / "one_image", "0.png")
    (folder / "unreadable").mkdir()
    for number in range(3):
        (folder / "unreadable" / f"{number}.png").write_bytes(b"no picture")
    schedule = Schedule(method="ward", depth=12, tokens=257, protected=1, r=(0, 0, 0, *[16] * 8, 0))
    changes = {
        "schedule": {},
        "other_depth": {"depth": 2, "r": (1, 1)},
        "other_tokens": {"tokens": 99},
        "negative": {"r": (-1,) * 12},
        "nan": {"r": (float("nan"),) * 12},
    }
    for name, change in changes.items():
        replace(schedule, **change).write(folder / f"{name}.json")
    (folder / "recipe.toml").write_text(f'model = "embedded_small"\ndata = "{images}"\n')
    (folder / "bad.toml").write_text("model = \n")
    os.mkfifo(folder / "fifo")
    for name, minor in (("device", 3), ("full", 7)):  # nodes of our own: a defect would replace those in /dev
        try:
            os.mknod(folder / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        except OSError:  # not root
            continue
    return {path.name: str(path) for path in folder.iterdir()} | {"files": str(folder), "null": "/dev/null"}


@pytest.fixture(autouse=True)
def _no_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """A case that takes longer than this hangs."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"still running after {_SECONDS} s")

    if request.node.get_closest_marker("slow"):
        yield
        return
    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


@pytest.fixture
def command(
    files: Files, workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[str], Outcome]]:
    """Runs a command line, with the files for names in braces, in an empty working directory."""
    run = Command(monkeypatch, capsys)
    before = _listing(Path(files["files"]))

    def call(line: str) -> Outcome:
        for name in ("device", "full"):
            if f"{{{name}}}" in line and name not in files:
                pytest.skip("device nodes can be made by root alone")
        with warnings.catch_warnings():  # as in a process of its own, where every warning is shown
            warnings.resetwarnings()
            return run(*(_NAME.sub(lambda name: files[name[1]], word) for word in shlex.split(line)))

    yield call
    assert _listing(Path(files["files"])) == before, "an input file was changed"


@pytest.fixture
def refused(
    command: Callable[[str], Outcome], workdir: Path, record_property: Callable[[str, object], None]
) -> Callable[[str, str], str]:
    """Runs a command line that must be refused: one line with the given text, exit code 2, nothing written."""

    def call(line: str, says: str) -> str:
        outcome = command(line)
        assert outcome.code == 2, outcome
        assert outcome.out == "", outcome
        lines = outcome.err.splitlines()
        assert len(lines) == 1, outcome
        assert lines[0].startswith("mctf: "), outcome
        assert len(lines[0]) < 600, outcome
        assert lines[0].isprintable(), outcome
        assert says in lines[0], outcome
        left = sorted(str(path.relative_to(workdir)) for path in workdir.rglob("*"))
        assert not left, f"written: {left}"
        verb = line.split()[0]
        record_property("cases", [verb if verb in _COMMANDS else "mctf", 1])
        return lines[0]

    return call


@pytest.fixture
def accepted(
    command: Callable[[str], Outcome], workdir: Path, record_property: Callable[[str, object], None]
) -> Callable[[str], Outcome]:
    """Runs an odd command line that must work: exit code 0."""

    def call(line: str) -> Outcome:
        outcome = command(line)
        assert outcome.code == 0, outcome
        assert "Traceback" not in outcome.err, outcome
        shutil.rmtree(workdir)
        record_property("cases", [line.split()[0], 1])
        return outcome

    return call


def _listing(folder: Path) -> list[tuple[str, int, int, int]]:
    """Names, kinds, sizes and times of all files below a folder."""
    listing = []
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        listing.append((str(path), facts.st_mode, facts.st_size, facts.st_mtime_ns if path.is_file() else 0))
    return listing


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Cases by group, and how many of them held."""
    held: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "cases":
                held[value[0]] += value[1]
    broken = len(terminalreporter.stats.get("failed", [])) + len(terminalreporter.stats.get("error", []))
    terminalreporter.section("cases that held")
    for group, number in sorted(held.items()):
        terminalreporter.write_line(f"{group:12} {number:6,}")
    terminalreporter.write_line(f"{'total':12} {sum(held.values()):6,}, {broken} tests broke")
