"""The site's first page: its commands run, and the numbers that they print are explained there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click import Context
from click.testing import CliRunner

from helpers import five_minutes
from helpers.five_minutes import ACTIVATE, COPY, DEMO, PAGE, ROOT, SERVES, commands, printed, run
from mctf.cli import group
from mctf.evaluation.timing import MAX_SPREAD


def test_the_page_has_the_whole_path() -> None:
    first_words = [line.removeprefix(f"{ACTIVATE} && ").split()[:2] for line in commands(PAGE.read_text())]
    assert first_words == [DEMO.split(), SERVES.split(), ["mctf", "visualize"], ["mctf", "eval"]]
    assert [line.startswith(ACTIVATE) for line in commands(PAGE.read_text())] == [False, True, True, True]


def test_the_pages_name_the_spread_of_a_busy_machine() -> None:
    share = f"{100 * MAX_SPREAD:.0f} %"
    assert f"above {share} the demo says that the machine is busy" in PAGE.read_text()
    assert f"differ by more than {share}" in (ROOT / "docs/playground.md").read_text()


def test_what_the_demo_prints_is_run_as_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = (
        "picture   x.png\n\nnext      bin/mctf playground   # in the browser\n          bin/mctf eval m --data FOLDER\n"
    )
    assert printed(output) == ["bin/mctf playground", "bin/mctf eval m --data photos"]
    (tmp_path / "mctf").touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match="exit code 127"):
        run("mctf --help", folder=tmp_path)


def test_a_failing_command_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"failed with exit code 3:\nno"):
        run("echo no; exit 3", folder=tmp_path)
    with pytest.raises(RuntimeError, match="printed no address"):
        five_minutes.ask("echo nothing", folder=tmp_path, seconds=1)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder as the clone is: its Makefile, an environment that counts as installed, and a stranger's photographs."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    subprocess.run([sys.executable, "-c", COPY, str(tmp_path)], check=True)
    folder = tmp_path / ".venv/bin"
    folder.mkdir(parents=True)
    (folder / "mctf").write_text(f"#!{sys.executable}\nfrom mctf.cli import main\n\nmain()\n")
    (folder / "mctf").chmod(0o755)
    (folder / "activate").write_text(f'PATH="{folder}:$PATH"\n')
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(PAGE.read_text()))
def test_its_commands_run(command: str, place: Path) -> None:
    if command.endswith(SERVES) and "playground" not in group.list_commands(Context(group)):
        pytest.skip("this mctf has no playground")
    if command.startswith("make "):
        command += " --old-file=.venv/demo --old-file=pyproject.toml"
    output = run(command, folder=place)
    if "demo" in command:
        typed = printed(output)
        assert len(typed) == 3
        assert {line.split()[0] for line in typed} == {".venv/bin/mctf"}, "the environment is not activated"
        run(f"{typed[0]} --help", folder=place)
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
        words = command.removeprefix(f"{ACTIVATE} && ").split()
        if words[0] == "mctf" and not command.endswith(SERVES):
            text = CliRunner().invoke(group, [words[1], "--help"]).output
            options = re.findall(r"--[\w-]+", command)
            assert [option for option in options if option not in text] == []
