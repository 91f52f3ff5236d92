"""The script that measures the tables of a GPU: late tables are given up, and no table outlives the script."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mctf.cli.bench import command

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "run_tables.py"
# A table that names its process, compiles for as long as its name says, and measures once the gate is open.
TABLE = """
import json, os, pathlib, sys, time
name, folder, gate = sys.argv[1], *map(pathlib.Path, sys.argv[2:])
(folder / f"{name}.pid").write_text(str(os.getpid()))
time.sleep(float(name))
(gate / name).touch()
while not (gate / "open").exists():
    time.sleep(0.05)
(folder / f"{name}.json").write_text("{}")
"""
# The script with such tables; its arguments are the folder and the names.
RUN = f"""
import pathlib, runpy, subprocess, sys
script = runpy.run_path({str(SCRIPT)!r})
names = script["run_all"].__globals__
names["PATIENCE"] = 5
names["start"] = lambda name, folder, gate: subprocess.Popen(
    [sys.executable, "-c", {TABLE!r}, name, str(folder), str(gate)], start_new_session=True
)
sys.exit(script["run_all"](pathlib.Path(sys.argv[1]), sys.argv[2:]))
"""


def start(folder: Path, *names: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", RUN, str(folder), *names], stdout=subprocess.PIPE, text=True)


def is_running(process: int) -> bool:
    """Whether a process runs; one that ended and that nobody waited for does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for(condition: Any) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_table_outlives_the_script(tmp_path: Path, number: signal.Signals) -> None:
    script = start(tmp_path, "600", "601")
    files = [tmp_path / "600.pid", tmp_path / "601.pid"]
    tables: list[int] = []
    try:
        assert wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        tables = [int(file.read_text()) for file in files]
        script.send_signal(number)
        assert script.wait(timeout=30) == 128 + number
        assert wait_for(lambda: not any(map(is_running, tables)))
    finally:
        script.kill()
        for table in filter(is_running, tables):
            os.kill(table, signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_table_that_compiles_too_long_is_given_up(tmp_path: Path) -> None:
    script = start(tmp_path, "0", "600")
    text, _ = script.communicate(timeout=60)
    assert script.returncode == 1
    assert text.splitlines()[0] == "600: not compiled in 5 s"
    assert sorted(text.splitlines()[1:]) == ["0: done", "600: failed with -9"]
    assert json.loads((tmp_path / "0.json").read_text()) == {}
    assert not (tmp_path / "600.json").exists()


def test_every_table_is_a_command_of_bench() -> None:
    script = runpy.run_path(str(SCRIPT))
    for words in script["TABLES"].values():
        command.make_context("bench", f"{words} {script['COMMON']}".split())
