"""`mctf demo`: with and without weights, as text and as JSON, and what it refuses."""

import json
import re

import pytest
import torch
from huggingface_hub import constants
from PIL import Image

import mctf
from helpers.command_line import Command
from mctf.cli import demo
from mctf.evaluation.timing import Timing
from mctf.models import loading
from mctf.models.class_names import class_names
from mctf.models.loading import create
from mctf.viz import demo as viz_demo

QUICK = ("--model", "test_vit", "-r", 8, "--batch", 2, "--rounds", 2, "--device", "cpu")


@pytest.fixture
def command(monkeypatch, capsys, tmp_path) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return Command(monkeypatch, capsys)


def test_by_default_the_embedded_model_names_what_is_in_the_photographs(command, tmp_path) -> None:
    outcome = command("demo", "--batch", 1, "--rounds", 1, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert str(mctf.plan("embedded", r="fast")) in outcome.out
    assert "weights: pretrained, 200 classes" in outcome.out
    names = "|".join(re.escape(names.split(",")[0]) for names in class_names().values())
    for photograph in ("chelsea", "coffee", "rocket", "astronaut"):
        answer = rf"^  {photograph} +({names}) \d+% +fused: ({names}) \d+%$"
        assert re.search(answer, outcome.out, flags=re.MULTILINE), outcome.out
    sheet = Image.open(tmp_path / "mctf-demo" / "fused.png")
    assert sheet.height > 4 * 448, "photographs of 64 pixels are enlarged seven times"


def test_without_network_random_weights_are_reported(command, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = command("demo", *QUICK)
    assert outcome.code == 0, outcome.err
    assert "weights: RANDOM" in outcome.out
    assert "this does not carry over to a trained model" in outcome.out
    assert str(mctf.plan("test_vit", r=8)) in outcome.out
    assert re.search(r"images/s fused,\s+[0-9.]+\s+baseline:\s+[0-9.]+x", outcome.out)
    assert "batch 2, float32, cpu" in outcome.out
    assert "chelsea" not in outcome.out, "predictions of random weights are not shown"
    sheet = Image.open(tmp_path / "mctf-demo" / "fused.png")
    assert sheet.height > 4 * 3 * 160, "four photographs, enlarged three times"
    assert outcome.err == ""
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_json_is_one_object(command, tmp_path) -> None:
    torch.save(create("test_vit").state_dict(), tmp_path / "own.pt")
    outcome = command("demo", *QUICK, "--weights", tmp_path / "own.pt", "--output", "deep/folder", "--json")
    facts = json.loads(outcome.out)
    assert facts["weights"] == "own.pt"
    assert [each["photograph"] for each in facts["predictions"]] == ["chelsea", "coffee", "rocket", "astronaut"]
    assert facts["plan"]["token_counts"] == mctf.plan("test_vit", r=8).token_counts
    assert facts["speed"]["speedup"] > 0
    assert facts["speed"]["batch"] == 2
    assert facts["fidelity"]["agreement"] is not None
    assert facts["fidelity"]["kl"] > 0
    assert (tmp_path / facts["picture"]).is_file()


def test_speedup_is_that_of_the_fused_model_over_the_baseline(monkeypatch) -> None:
    files = viz_demo.photographs()[:2]
    shown = viz_demo.Demonstration.of(create("test_vit"), files, method="mctf", r=8, device=torch.device("cpu"))

    def measured(forwards, **_: object) -> dict[str, Timing]:
        with mctf.trace(shown.fused) as trace:
            logits = forwards["fused"]()
        assert trace.token_counts == shown.plan.token_counts
        assert torch.equal(forwards["baseline"]()[:2], shown.baseline(shown.pixels))
        assert len(logits) == 3
        return {"baseline": Timing((3.0,)), "fused": Timing((1.5,)), "free_drop": Timing((1.0,))}

    monkeypatch.setattr(viz_demo, "time_interleaved", measured)
    speed = shown.speed(batch=3, rounds=1)
    assert (speed.baseline_images_per_second, speed.fused_images_per_second, speed.speedup) == (1, 2, 2)
    assert speed.upper_bound == 3


@pytest.mark.parametrize(
    ("speedup", "upper_bound", "spread", "verdict"),
    [
        (1.5, 1.7, 0.05, ""),
        (1.0, 1.1, 0.05, "does not pay"),
        (0.8, 1.0, 0.05, "does not pay"),
        (1.5, 1.7, 0.9, "nothing can be concluded"),
        (0.1, 0.2, 0.002, "nothing can be concluded"),
    ],
)
def test_no_gain_and_a_busy_machine_are_reported(speedup, upper_bound, spread, verdict) -> None:
    conditions = {"rounds": 7, "batch": 8, "dtype": "float32", "device": "cpu"}
    speed = viz_demo.Speed(10, 10 * speedup, speedup, upper_bound, spread, **conditions)
    _, _, _, *remarks = demo._speed_text(speed).splitlines()
    assert verdict in " ".join(" ".join(remarks).split())
    assert bool(remarks) is bool(verdict)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-r", "nan"], "r=nan is neither"),
        (["--model", "deit_smal_patch16_224"], "did you mean 'deit_small_patch16_224"),
        (["--model", "resnet18"], "ResNet cannot be fused"),
        (["--method", "mtcf"], "did you mean 'mctf'?"),
        (["--weights", "missing.pt"], "there is no weights file missing.pt"),
        (["--output", "a_file"], "a_file is not a folder"),
        (["--output", "a_file/below"], "a_file is not a folder"),
        (["--device", "toaster"], "'toaster' cannot be used"),
        (["--batch", "0"], "0 is not in the range"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(
    command, tmp_path, arguments: list[str], complaint: str
) -> None:
    (tmp_path / "a_file").touch()
    assert complaint in command.refusal("demo", *QUICK, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]


def test_without_scikit_image_it_is_refused_before_the_work(command, monkeypatch) -> None:
    monkeypatch.setattr(viz_demo, "find_spec", lambda name: None)
    monkeypatch.setattr(loading, "load_or_random", lambda *_, **__: pytest.fail("the model was loaded"))
    assert "pip install 'mctf[demo]'" in command.refusal("demo", *QUICK)


def test_an_unknown_method_is_refused_before_the_model_is_loaded(command, monkeypatch) -> None:
    monkeypatch.setattr(loading, "load_or_random", lambda *_, **__: pytest.fail("the model was loaded"))
    assert "did you mean 'mctf'?" in command.refusal("demo", *QUICK, "--method", "mtcf")
