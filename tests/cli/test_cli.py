"""The command: its help, its errors in one line with exit code 2, and `mctf plan`."""

import json
import subprocess
import sys

import click
import pytest

import mctf
from helpers.command_line import Command
from mctf import cli

VERBS = list(cli._VERBS)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def imported_by(code: str) -> set[str]:
    """Heavy packages that a fresh interpreter has loaded after this code."""
    probe = f"import sys\n{code}\nprint(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return {"torch", "timm", "numpy", "PIL"} & set(answer.stdout.split())


def test_import_and_help_need_no_torch() -> None:
    ask = "import sys; sys.argv = ['mctf', '--help']\nfrom mctf.cli import main\ntry: main()\nexcept SystemExit: pass"
    assert imported_by(f"import mctf; mctf.__version__; dir(mctf)\n{ask}") == set()


def test_the_probe_notices_a_heavy_package() -> None:
    assert imported_by("import numpy") == {"numpy"}


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_verbs(command, flag: str) -> None:
    code, out, _ = command(flag)
    assert code == 0
    assert all(f"  {verb} " in out for verb in VERBS)


def test_the_group_knows_its_verbs() -> None:
    context = click.Context(cli.group)
    assert cli.group.list_commands(context) == VERBS
    assert {"plan", "eval", "visualize", "demo"} <= set(VERBS)
    assert cli.group.get_command(context, "nothing") is None


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_examples(command, verb: str) -> None:
    code, out, _ = command(verb, "--help")
    assert code == 0
    assert "Examples:" in out
    assert f"mctf {verb}" in out.split("Examples:")[1]
    assert "--json" in out


def test_version(command) -> None:
    code, out, _ = command("--version")
    assert code == 0
    assert mctf.__version__ in out


def test_plan_prints_the_table(command) -> None:
    code, out, err = command("plan", "deit_tiny_patch16_224", "-r", "8")
    assert code == 0
    assert out.strip() == str(mctf.plan("deit_tiny_patch16_224", r=8))
    assert err == ""


def test_plan_prints_json(command) -> None:
    words = ("-r", "0.1", "--method", "tome", "--blocks", "3,6,-1", "--image-size", "224x448", "--json")
    code, out, _ = command("plan", "deit_tiny_patch16_224", *words)
    options = {"r": 0.1, "method": "tome", "blocks": (3, 6, -1), "image_size": (224, 448)}
    assert code == 0
    assert json.loads(out) == mctf.plan("deit_tiny_patch16_224", **options).as_dict()


def test_plan_gives_options_to_the_method(command) -> None:
    code, out, _ = command("plan", "deit_tiny_patch16_224", "--json", "--option", "attention=exact")
    assert code == 0
    assert json.loads(out) == mctf.plan("deit_tiny_patch16_224", attention="exact").as_dict()


def test_plan_reads_fast(command) -> None:
    code, out, _ = command("plan", "deit_tiny_patch16_224", "-r", "fast", "--json")
    assert code == 0
    assert json.loads(out)["token_counts"][-1] == 56


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("plam deit_tiny_patch16_224", "there is no command 'plam': did you mean 'plan'?"),
        ("nothing", "there is no command 'nothing': choose from "),
        ("plan", "Missing argument 'MODEL'"),
        ("plan deit_tiny_patch16_22", "did you mean 'deit_tiny_patch16_224'?"),
        ("plan resnet18", "ResNet cannot be fused, it has no global attention"),
        (
            "plan deit_tiny_patch16_224 -r many",
            "r='many' is not a number: write a count (16), a ratio (0.35) or 'fast'",
        ),
        ("plan deit_tiny_patch16_224 -r -4", "r=-4 is negative"),
        ("plan deit_tiny_patch16_224 -r 1.5", "r=1.5 is neither"),
        ("plan deit_tiny_patch16_224 -r nan", "r='nan' is not a number"),
        ("plan deit_tiny_patch16_224 --blocks 3;6", "--blocks '3;6' is not a list of numbers: write 3,6,9"),
        ("plan deit_tiny_patch16_224 --blocks 12", "blocks names 12, but the model has blocks 0 to 11"),
        ("plan deit_tiny_patch16_224 --method tomi", "did you mean 'tome'?"),
        ("plan deit_tiny_patch16_224 --image-size big", "--image-size 'big' is not a size: write 384 or 384x512"),
        ("plan deit_tiny_patch16_224 --image-size 0", "--image-size '0' is not a size"),
        ("plan deit_tiny_patch16_224 --image-size 1x2x3", "is not a size"),
        ("plan deit_tiny_patch16_224 --jsn", "No such option"),
    ],
    ids=lambda value: value if value.startswith("p") else None,
)
def test_errors_are_one_line_with_exit_code_2(command, words: str, text: str) -> None:
    code, out, err = command(*words.split(" "))
    assert code == 2
    assert out == ""
    assert text in err
    assert err.startswith("mctf: ")
    assert err.count("\n") == 1


def test_interruption_is_no_traceback(command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "group", interrupt)
    code, _, err = command()
    assert code == 130
    assert err == "mctf: interrupted\n"


def test_the_installed_command_runs() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", "from mctf.cli import main; main()", "plan", "no_such_model"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 2
    assert answer.stderr.startswith("mctf: timm has no model 'no_such_model'")
