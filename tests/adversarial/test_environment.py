"""Odd surroundings of the command: closed streams, full devices, readers that leave, signals, a working directory that
is gone, variables with nonsense."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import mctf.cli
from helpers.command_line import Outcome
from mctf import MctfError
from mctf.cli.output import tell
from mctf.cli.progress import import_module
from mctf.distributed import init_distributed
from mctf.errors import is_out_of_memory
from mctf.train.config import read_toml
from mctf.train.signals import catch_signals

MCTF = f"{sys.executable} -m mctf"
EVAL = "eval embedded_small --data {images} -r 0 --limit 2"


@pytest.fixture(autouse=True)
def _count(record_property: Callable[[str, object], None]) -> None:
    record_property("cases", ["environment", 1])


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize(
    ("line", "code", "lines"),
    [
        ("--help >&-", 0, 0),
        ("--help <&- >&- 2>&-", 0, 0),
        ("plan embedded_small -r x 2>&-", 2, 0),
        ("plan embedded_small -r x 2>/dev/full", 2, 0),
        ("--help >/dev/full", 2, 1),
        ("plan embedded_small -r x >&-", 2, 1),
    ],
)
def test_streams_that_are_closed_or_full(line: str, code: int, lines: int) -> None:
    result = shell(f"{MCTF} {line}")
    assert (result.returncode, len(result.stderr.splitlines())) == (code, lines), result


def test_a_reader_that_leaves() -> None:
    result = shell(f"set -o pipefail; {MCTF} eval --help | true")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "streams", [*(pytest.param(each, marks=pytest.mark.nightly) for each in (">&-", "2>&-")), "<&- >&- 2>&-"]
)
def test_results_are_written_without_streams(files: dict[str, str], tmp_path: Path, streams: str) -> None:
    line = f"{MCTF} {EVAL.format(images=files['images'])} --output {tmp_path}/out.json {streams}"
    assert shell(line).returncode == 0
    assert (tmp_path / "out.json").read_text().startswith("{")


def test_results_are_printed_where_their_file_cannot_be_written(command: Callable[[str], Outcome]) -> None:
    outcome = command(EVAL + " --output {full}")
    assert outcome.code == 2
    assert json.loads(outcome.out)["rows"]
    assert re.fullmatch(r"mctf: .* cannot be written \(No space left on device\): .*\n", outcome.err)


def test_a_comparison_is_printed_where_its_plot_cannot_be_written(
    command: Callable[[str], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MctfError("plot.svg cannot be written (No space left on device): choose another file")

    pytest.importorskip("matplotlib")
    monkeypatch.setattr("mctf.viz.plots.write_plot", full)
    outcome = command("compare embedded_small --data {images} --methods tome --gflops 0.5 --limit 2 --plot plot.svg")
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert "tome" in outcome.out


def test_a_run_goes_on_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(click, "echo", broken)
    tell("step 3 of 8")


@pytest.mark.parametrize("verb", ["plan embedded_small", "demo", "reproduce --out report"])
def test_a_working_directory_that_is_gone(tmp_path: Path, verb: str) -> None:
    result = shell(f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir {tmp_path}/gone; {MCTF} {verb}")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "mctf: the working directory was removed: go to one that exists (cd)",
    ]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("disguised", [False, True])
def test_signals_are_one_line(
    command: Callable[[str], Outcome], monkeypatch: pytest.MonkeyPatch, name: str, disguised: bool
) -> None:
    number = getattr(signal, name)
    found = signal.getsignal(number)  # SIGINT is ignored in a shell's background
    before = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    signal.signal(number, before)

    def stopped(_: object) -> None:
        try:
            signal.raise_signal(number)
        except BaseException:
            if not disguised:
                raise
            raise ImportError("half a library") from None  # as imports report an interruption

    monkeypatch.setattr("mctf.cli.progress.import_module", stopped)
    outcome = command("plan embedded_small")
    said = "interrupted" if name == "SIGINT" else f"stopped by {name}"
    assert outcome == Outcome(128 + number, "", f"mctf: {said}\n")
    assert signal.getsignal(number) is before
    signal.signal(number, found)


@pytest.mark.parametrize("moment", ["report", "restore"])
def test_signals_that_come_while_the_command_ends(
    command: Callable[[str], Outcome], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    owner, name = (mctf.cli, "_report") if moment == "report" else (signal, "signal")
    original, sent = getattr(owner, name), []

    def interrupted(*arguments: Any) -> Any:
        if not sent and (moment == "report" or arguments == (signal.SIGTERM, before)):
            sent.append(arguments)
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(owner, name, interrupted)
    outcome = command("plan no_such_model")
    assert sent
    assert outcome.code == 128 + signal.SIGTERM
    assert "Traceback" not in outcome.err
    assert signal.getsignal(signal.SIGTERM) == before


def test_signals_that_are_ignored_stay_ignored(
    command: Callable[[str], Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr("mctf.cli.progress.import_module", lambda name: signal.raise_signal(signal.SIGHUP))
        assert command("plan embedded_small").code == 0
        with catch_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_training_stops_after_the_step_when_the_terminal_closes() -> None:
    with catch_signals() as stop:
        signal.raise_signal(signal.SIGHUP)
    assert stop.signal == signal.SIGHUP


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "there is too little memory"),
        (
            ValueError("Invalid log settings: bogus,\nmust be\na list"),
            "cannot be loaded (Invalid log settings: bogus,)",
        ),
        (ModuleNotFoundError("No module named 'timm'"), "cannot be loaded (No module named 'timm')"),
    ],
)
def test_libraries_that_cannot_be_loaded(
    refused: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch, failure: Exception, says: str
) -> None:
    def fail(name: str) -> Any:
        if name in ("torch", "timm"):
            raise failure
        return import_module(name)

    monkeypatch.setattr("mctf.cli.progress.import_module", fail)
    refused("plan embedded_small", says)


def test_an_import_that_fails_otherwise_is_no_lack_of_memory() -> None:
    assert not is_out_of_memory(ImportError("no such symbol"))


@pytest.mark.parametrize("rank", ["2", "5"])
def test_a_rank_beyond_the_group_does_not_wait(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29999"}.items():
        monkeypatch.setenv(name, value)
    refusal = pytest.raises(MctfError, match=f"RANK={rank} is not below WORLD_SIZE=2")
    with refusal, init_distributed(torch.device("cpu")):
        pass


@pytest.mark.parametrize("columns", ["1", "3", "20", "0", "-5", "abc"])
def test_no_terminal_is_too_narrow_for_the_numbers(
    command: Callable[[str], Outcome], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    outcome = command(EVAL)
    row = next(line.split() for line in outcome.out.splitlines() if line.split()[:2] == ["mctf", "0"])
    assert "100.0" in row
    assert "0.0000" in row


def test_plots_need_no_backend(command: Callable[[str], Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "nonsense")
    command("--version")
    assert os.environ["MPLBACKEND"] == "agg"


def test_recipes_from_windows_and_options_given_twice(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_bytes(b"\xef\xbb\xbflog-steps = 3\r\n")
    assert read_toml(recipe) == {"log_steps": 3}
    for twice in ("log-steps = 3\nlog_steps = 4", "colour_jitter = 0.1\ncolor_jitter = 0.2"):
        recipe.write_text(twice)
        with pytest.raises(MctfError, match=r"gives (log_steps|color_jitter) twice: keep one of the lines"):
            read_toml(recipe)
