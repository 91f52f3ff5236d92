"""Running the `mctf` command inside a test: what it prints, what it complains of, how it exits."""

import sys
from typing import NamedTuple

import pytest

import mctf.cli


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class Command:
    """Call it like the command, after words it always begins with: `Command(…)("plan", "test_vit")`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str], *beginning: str) -> None:
        self.monkeypatch = monkeypatch
        self.capture = capture
        self.beginning = beginning

    def __call__(self, *arguments: object) -> Outcome:
        self.monkeypatch.setattr(sys, "argv", ["mctf", *self.beginning, *map(str, arguments)])
        self.capture.readouterr()
        try:
            mctf.cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = self.capture.readouterr()
        return Outcome(code, printed.out, printed.err)

    def refusal(self, *arguments: object) -> str:
        """The one line of complaint of a command that is refused with exit code 2 and prints nothing else."""
        outcome = self(*arguments)
        assert outcome.code == 2, outcome
        assert outcome.out == "", outcome
        lines = outcome.err.splitlines()
        assert len(lines) == 1, outcome
        assert lines[0].startswith("mctf: "), outcome
        return lines[0]
