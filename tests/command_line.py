"""Running the `mctf` command inside a test: what it prints, what it complains of, how it exits."""

import sys
from dataclasses import dataclass

import pytest

import mctf.cli


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


class Command:
    """Call it like the command: `mctf("plan", "test_vit")`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *arguments: object) -> Outcome:
        self.monkeypatch.setattr(sys, "argv", ["mctf", *map(str, arguments)])
        self.capsys.readouterr()
        try:
            mctf.cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = self.capsys.readouterr()
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
