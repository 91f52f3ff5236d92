"""`mctf bench`: what is compared, what is refused, and that a wrong model is not timed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

import mctf
from helpers.command_line import Command
from mctf.evaluation import benchmark
from mctf.evaluation.benchmark import CEILING, PLAIN, Contest, Result, verdicts
from mctf.evaluation.timing import DISTURBED, timed


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setattr(benchmark, "_repeats", lambda *_: 1)  # long enough to compare nothing, short enough for a test
    return Command(monkeypatch, capsys, "bench")


def result(name: str, milliseconds: float, speedup: float) -> Result:
    return Result(name, 16, 8, milliseconds, 0.0, 1.0, speedup, 1.0, None, None, None)


def test_every_contender_is_measured(bench: Command, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    outcome = bench("test_vit", "-r", "8,fast", "--batch", "1,2", "--rounds", 1, "--json", "--output", file)
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    assert facts == json.loads(file.read_text())
    assert len(facts["tables"]) == 4
    for table in facts["tables"]:
        rows = {row["name"]: row for row in table["rows"]}
        assert list(rows) == [PLAIN, "mctf", "mctf_exact", "tome", CEILING]
        assert rows[PLAIN]["speedup"] == 1
        assert rows["mctf"]["difference"] < 1e-5
        assert all(row["images_per_second"] > 0 for row in rows.values())
        assert rows["mctf"]["gflops"] < rows[PLAIN]["gflops"]


def test_training_is_timed_too(bench: Command) -> None:
    facts = json.loads(bench("test_vit", "-r", 8, "-m", "mctf_exact", "--batch", 2, "--training", "--json").out)
    (table,) = facts["tables"]
    assert facts["training"]
    assert table["title"].endswith("forward and backward")
    assert [row["name"] for row in table["rows"]] == [PLAIN, "mctf_exact", CEILING]


def test_the_table_is_for_people(bench: Command) -> None:
    outcome = bench("test_vit", "-m", "mctf", "--rounds", 1)
    assert "test_vit, r=16, batch 8, 160x160, " in outcome.out
    assert "speed-up" in outcome.out
    assert "mctf r=16" in outcome.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["test_vit", "--batch", "0"], "--batch '0' is not a list of positive numbers: write 1,8,64"),
        (["test_vit", "-m", "tomee"], "unknown method 'tomee': did you mean 'tome'?"),
        (["test_vit", "-r", "x"], "r='x' is not a number"),
        (["resnet18"], "ResNet cannot be fused"),
        (["test_vit", "-m", "ats", "--compile"], "ats keeps as many tokens as each image needs"),
        (["test_vit", "--compile", "--mode", "reduce-overheat"], "did you mean 'reduce-overhead'?"),
        (["test_vit", "--mode", "reduce-overhead"], "add --compile"),
        (["test_vit", "--output", "no/such/folder.json"], "there is no folder"),
    ],
    ids=str,
)
def test_bad_input_is_refused_in_one_line(bench: Command, arguments: list[str], text: str) -> None:
    assert text in bench.refusal(*arguments)


class WrongInHalfPrecision(nn.Module):
    """Answers 5 in float32 and 1 in anything less."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        return torch.full((len(images), 10), 5.0 if self.weight.dtype == torch.float32 else 1.0)


@torch.inference_mode()
def test_a_wrong_model_is_not_timed() -> None:
    images = torch.randn(2, 3, 160, 160)
    assert benchmark.check(mctf.fuse(timm.create_model("test_vit").eval(), r=8), images, "mctf") < 1e-5
    with pytest.raises(mctf.MctfError, match=r"mctf is wrong on this machine: its output is 80\.0% off"):
        benchmark.check(WrongInHalfPrecision().bfloat16(), images.bfloat16(), "mctf")


@torch.inference_mode()
def test_what_is_checked_is_what_is_timed() -> None:
    model, images = mctf.fuse(timm.create_model("test_vit").eval(), r=8), torch.randn(6, 3, 160, 160)
    assert benchmark.check(model, images, "mctf", run=torch.compile(model, backend="eager")) < 1e-5
    with pytest.raises(mctf.MctfError, match="is wrong on this machine"):
        benchmark.check(model, images, "mctf", run=lambda images: 2 * model(images))


def test_verdicts_say_so_when_fusing_does_not_pay() -> None:
    results = [result(PLAIN, 10, 1.0), result("mctf", 12, 0.83), result("tome", 6, 1.67), result(CEILING, 5, 2.0)]
    assert verdicts(results) == [
        "mctf r=16 does not pay here: 0.83 times the plain model's speed",
        "tome r=16: 1.67x, 20% slower than dropping for nothing",
    ]


def test_verdicts_name_those_whose_gpu_waits_for_the_host() -> None:
    busy, waiting = result("mctf", 6, 1.67), result("mctf_exact", 5, 2.0)
    results = [replace(busy, launch_milliseconds=3.0), replace(waiting, launch_milliseconds=4.9)]
    assert "mctf_exact; --compile --mode reduce-overhead" in verdicts(results)[-1]
    assert "GPU" not in "".join(verdicts([busy, replace(waiting, launch_milliseconds=2.0)]))


def test_only_some_modes_replay_graphs() -> None:
    modes = {None: False, "default": False, "reduce-overhead": True, "max-autotune": True}
    for mode, replays in modes.items():
        assert Contest(("mctf",), 8, 1, (64, 64), compiled=mode).replays_graphs == replays


def test_launching_ends_before_the_work_does() -> None:
    assert benchmark._launching(lambda: None, torch.device("cpu")) is None
    if torch.cuda.is_available():
        x = torch.randn(4096, 4096, device="cuda")
        _, taken = timed(lambda: x @ x @ x @ x, x.device)
        assert benchmark._launching(lambda: x @ x @ x @ x, x.device) < taken * 1e3


def test_verdicts_warn_of_unsteady_rounds() -> None:
    steady = [result(PLAIN, 10, 1.0), result("tome", 6, 1.67)]
    assert DISTURBED not in verdicts(steady)
    assert verdicts([steady[0], replace(steady[1], spread=0.3)])[-1] == DISTURBED


def test_a_model_that_is_no_vit_is_refused() -> None:
    model = timm.create_model("test_resnet")
    with pytest.raises(mctf.MctfError, match="ResNet"):
        benchmark.benchmark(model, Contest(("mctf",), 8, 1, (64, 64)))
