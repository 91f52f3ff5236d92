"""The `mctf` command inside a test: its stdout, stderr and exit code."""

import sys
from typing import NamedTuple

import pytest

import mctf.cli


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class Command:
    """Called like the command, after arguments that are always the same: `Command(…, "plan")("test_vit")`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str], *first: object) -> None:
        self.monkeypatch = monkeypatch
        self.capture = capture
        self.first = first

    def __call__(self, *arguments: object) -> Outcome:
        self.monkeypatch.setattr(sys, "argv", ["mctf", *map(str, (*self.first, *arguments))])
        self.capture.readouterr()
        try:
            mctf.cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = self.capture.readouterr()
        return Outcome(code, printed.out, printed.err)

    def refusal(self, *arguments: object) -> str:
        """The one line on stderr of a command that exits with code 2 and prints nothing else."""
        outcome = self(*arguments)
        assert outcome.code == 2, outcome
        assert outcome.out == "", outcome
        lines = outcome.err.splitlines()
        assert len(lines) == 1, outcome
        assert lines[0].startswith("mctf: "), outcome
        return lines[0]
