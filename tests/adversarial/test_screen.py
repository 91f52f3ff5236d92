"""What a terminal of 80 columns shows: the help first, nothing wider, no number in two pieces, progress that moves."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Callable

import pytest

from helpers.command_line import Outcome
from mctf.cli import _COMMANDS

Run = Callable[[str], Outcome]
NUMBER = re.compile(r"\d")


@pytest.fixture(params=[80, 60])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def test_the_bare_command_prints_the_help(command: Run) -> None:
    bare, asked = command(""), command("--help")
    assert bare == asked
    assert (bare.code, bare.err) == (0, "")
    for name in _COMMANDS:
        assert re.search(rf"^  {name} ", bare.out, re.M)


@pytest.mark.parametrize("name", ["", *_COMMANDS])
def test_help_fits(command: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert widest(command(f"{name} --help").out) <= 80


@pytest.mark.parametrize(
    "line",
    [
        "plan embedded_small",
        "plan vit_large_patch14_224 --image-size 14000",
        "eval embedded_small --data {images} -m mctf,ats -r 0,16,fast --limit 4",
        pytest.param(
            "compare embedded_small --data {images} --methods mctf,evit,ats,dynamic_vit --gflops 0.5,0.6 --limit 2",
            marks=pytest.mark.slow,
        ),
        "compare embedded_small --data {images} --methods tome --gflops 0.05,0.5 --limit 2",
        "finetune embedded_small --data {images} --epochs 1 --batch 4 -r 4 --augmentation weak",
    ],
)
def test_output_fits(command: Run, columns: int, line: str) -> None:
    outcome = command(line)
    assert outcome.code == 0
    longest_word = max(map(len, outcome.out.split()))  # a path cannot be broken
    assert widest(outcome.out) <= max(columns, 2 + longest_word)
    headings = next((text for text in outcome.out.splitlines() if text.startswith("method")), None)
    if headings is None:
        return
    table = outcome.out[outcome.out.index(headings) :].split("\n \n")[0].splitlines()[2:]
    assert "…" not in "".join([headings, *table])
    cells = {len(re.split(r"\s{2,}", row.strip())) for row in table if NUMBER.search(row)}
    assert cells == {len(re.split(r"\s{2,}", headings.strip()))}, outcome.out


def test_columns_that_do_not_fit_are_named(command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "compare embedded_small --data {images} --methods tome --gflops 0.5 --limit 2"
    monkeypatch.setenv("COLUMNS", "120")
    assert "left out" not in command(line).out
    monkeypatch.setenv("COLUMNS", "70")
    narrow = command(line).out
    assert "left out, as the terminal is narrow: target" in " ".join(narrow.split())
    assert "KL" in narrow


def widest(text: str) -> int:
    return max(len(line.rstrip()) for line in text.splitlines())


@pytest.mark.slow
def test_progress_moves_from_the_first_second_on(files: dict[str, str]) -> None:
    """On a real terminal of 80 columns no gap is longer than a few seconds, the imports included."""
    methods = "mctf,tome,evit,bat,ats"
    line = ["compare", "embedded_small", "--data", files["images"], "--methods", methods, "--gflops", "0.5,0.6"]
    start = time.monotonic()
    process, terminal = pty.fork()
    if process == 0:
        environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "mctf", *line], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    gaps, text, last = [], b"", start
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # the end, as Linux reports it
            break
        if not part:
            break
        text += part
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, text.decode()
    assert max(gaps) < 5, f"silent for {max(gaps):.1f} s"
    for stage in (b"loading PyTorch", b"loading embedded_small", b"matching FLOPs", b"comparing"):
        assert stage in text
    plain = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", text).decode().replace("\r", "\n")
    assert widest(plain) <= 80 or widest(plain) <= max(map(len, plain.split())) + 2
