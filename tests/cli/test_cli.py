"""The command: its help, its one-line errors with exit code 2, and `mctf plan`."""

import json
import subprocess
import sys

import click
import pytest

import mctf
from helpers.command_line import Command
from mctf import cli

COMMANDS = list(cli._COMMANDS)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


PROBE = """
import json, sys

facts = {}

def loaded():
    return [name for name in ("torch", "timm", "numpy", "PIL", "skimage") if name in sys.modules]

def run(*words):
    sys.argv = ["mctf", *words]
    main()

import mctf
mctf.__version__, dir(mctf)
from mctf.cli import main
run("--help")
facts["help"] = loaded()
from mctf.viz.demo import photographs
photographs()
facts["photographs"] = loaded()
print(json.dumps(facts))
run("plan", "no_such_model")
"""


@pytest.fixture(scope="module")
def probe() -> subprocess.CompletedProcess[str]:
    """One fresh interpreter for all that imports and exit codes are about; its last line on stdout is JSON."""
    return subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)


def test_a_fresh_process(probe: subprocess.CompletedProcess[str]) -> None:
    facts = json.loads(probe.stdout.splitlines()[-1])
    assert facts["help"] == [], "import mctf and mctf --help need no torch"
    assert "torch" in facts["photographs"], "the probe notices a heavy package"
    assert "skimage" not in facts["photographs"], "photographs are found without importing scikit-image"
    assert probe.returncode == 2
    assert probe.stderr.startswith("mctf: timm has no model 'no_such_model'")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_commands(command, flag: str) -> None:
    code, out, _ = command(flag)
    assert code == 0
    assert all(f"  {name} " in out for name in COMMANDS)


def test_the_group_lists_its_commands() -> None:
    context = click.Context(cli.group)
    assert cli.group.list_commands(context) == COMMANDS
    assert {"plan", "eval", "visualize", "demo"} <= set(COMMANDS)
    assert cli.group.get_command(context, "nothing") is None


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_examples(command, name: str) -> None:
    code, out, _ = command(name, "--help")
    assert code == 0
    assert "Examples:" in out
    assert f"mctf {name}" in out.split("Examples:")[1]
    assert ("--json" in out) == (name != "playground"), "a page is no JSON"
    if name not in ("finetune", "reproduce"):
        assert max(map(len, out.splitlines())) <= 80


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


@pytest.mark.parametrize("word", ["--trim-last", "--no-trim-last"])
def test_plan_trims_the_last_block(command, word: str) -> None:
    code, out, _ = command("plan", "deit_tiny_patch16_224", "--flops", "0.6", "--method", "ward", word)
    planned = mctf.plan("deit_tiny_patch16_224", flops=0.6, method="ward", trim_last=word == "--trim-last")
    assert code == 0
    assert out.strip() == str(planned)
    assert planned.trimmed == (word == "--trim-last")


def test_plan_gives_options_to_the_method(command) -> None:
    code, out, _ = command("plan", "deit_tiny_patch16_224", "--json", "--option", "attention=exact")
    assert code == 0
    assert json.loads(out) == mctf.plan("deit_tiny_patch16_224", attention="exact").as_dict()


@pytest.mark.parametrize(
    ("text", "r"), [("fast", "fast"), ("1e-1", 0.1), ("0,8,8,8,8,8", (0, 8, 8, 8, 8, 8)), (" 16", 16)]
)
def test_r_is_read_as_by_the_library(command, text: str, r: object) -> None:
    code, out, err = command("plan", "test_vit", "-r", text, "--json")
    assert code == 0, err
    assert json.loads(out)["token_counts"] == mctf.plan("test_vit", r=r).token_counts


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
            "r='many' is no",
        ),
        ("plan deit_tiny_patch16_224 -r -4", "r=-4 is negative"),
        ("plan deit_tiny_patch16_224 -r 1.5", "r=1.5 is neither"),
        ("plan deit_tiny_patch16_224 -r nan", "r=nan is neither"),
        ("plan deit_tiny_patch16_224 --blocks 3;6", "blocks '3;6' is not a list of block numbers: write 3,6,9"),
        ("plan deit_tiny_patch16_224 --blocks 12", "blocks names 12, but the model has blocks 0 to 11"),
        ("plan deit_tiny_patch16_224 --method tomi", "did you mean 'tome'?"),
        ("plan deit_tiny_patch16_224 --image-size big", "image size 'big' is not a size: write 384 or 384x512"),
        ("plan deit_tiny_patch16_224 --image-size 0", "image size '0' is not a size"),
        ("plan deit_tiny_patch16_224 --image-size 1x2x3", "is not a size"),
        ("plan deit_tiny_patch16_224 --jsn", "No such option"),
    ],
    ids=lambda value: value if value.startswith("p") else None,
)
def test_errors_are_one_line_with_exit_code_2(command, words: str, text: str) -> None:
    assert text in command.refusal(*words.split(" "))


@pytest.mark.parametrize(
    ("code", "out", "err"),
    [
        (0, "", "mctf: no\n"),
        (2, "half a table", "mctf: no\n"),
        (2, "", "mctf: no\nTraceback\n"),
        (2, "", "no\n"),
        (2, "", ""),
    ],
)
def test_the_check_for_refusals_can_fail(
    command, monkeypatch: pytest.MonkeyPatch, code: int, out: str, err: str
) -> None:
    def run() -> None:
        print(out, end="")
        print(err, end="", file=sys.stderr)
        sys.exit(code)

    monkeypatch.setattr(cli, "main", run)
    with pytest.raises(AssertionError):
        command.refusal()


def test_interruption_is_no_traceback(command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "group", interrupt)
    code, _, err = command()
    assert code == 130
    assert err == "mctf: interrupted\n"
