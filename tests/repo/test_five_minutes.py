"""The site's first page: its commands run, and the numbers that they print are explained there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click import Context
from click.testing import CliRunner

from helpers import five_minutes
from helpers.five_minutes import COPY, PAGE, ROOT, SERVES, commands, run
from mctf.cli import group

BIN = Path(sys.executable).parent


def test_the_page_has_the_whole_path() -> None:
    first_words = [line.split()[:2] for line in commands(PAGE.read_text())]
    assert first_words == [["make", "demo"], SERVES.split(), ["mctf", "visualize"], ["mctf", "eval"]]


def test_a_failing_command_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"failed with exit code 3:\nno"):
        run("echo no; exit 3", folder=tmp_path, bin=BIN)
    with pytest.raises(RuntimeError, match="printed no address"):
        five_minutes.ask("echo nothing", folder=tmp_path, environment={}, seconds=1)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder as the clone is: its Makefile, an environment that counts as installed, and a stranger's photographs."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    subprocess.run([sys.executable, "-c", COPY, str(tmp_path)], check=True)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/mctf"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mctf "$@"\n')
    command.chmod(0o755)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(PAGE.read_text()))
def test_its_commands_run(command: str, place: Path) -> None:
    if command == SERVES and "playground" not in group.list_commands(Context(group)):
        pytest.skip("this mctf has no playground")
    if command.startswith("make "):
        command += " --old-file=.venv/demo --old-file=pyproject.toml BIN=bin"
    output = run(command, folder=place, bin=place / "bin")
    if "demo" in command:
        assert (place / "mctf-demo/fused.png").is_file()
        assert "images/s" in output
    if "visualize" in command:
        assert (place / "photo-fused.png").is_file()
    if "eval" in command:
        header = next(line for line in output.splitlines() if "GFLOPs" in line)
        explained = PAGE.read_text()
        missing = [word for word in re.findall(r"[A-Za-z][\w/-]+", header) if word not in explained]
        assert missing == []


def test_help_names_what_the_page_uses() -> None:
    for command in commands(PAGE.read_text()):
        if command.startswith("mctf ") and command != SERVES:
            text = CliRunner().invoke(group, [command.split()[1], "--help"]).output
            options = re.findall(r"--[\w-]+", command)
            assert [option for option in options if option not in text] == []
