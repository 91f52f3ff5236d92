"""`mctf tune`: its schedule, table, JSON object and plot; resumed searches; what other commands make of the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

import mctf
import mctf.evaluation.kl_meter
from helpers.command_line import Command
from helpers.images import write_folder
from mctf.schedule_file import Schedule, read_schedule


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capfd)


@pytest.fixture(scope="module")
def basic(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Arguments that every call has after its name."""
    folder = tmp_path_factory.mktemp("tune")
    write_folder(folder / "pictures", *(f"{index}.jpg" for index in range(6)))
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=3).state_dict(), folder / "tiny.safetensors")
    words = ("test_vit", "--data", folder / "pictures", "--weights", folder / "tiny.safetensors")
    return (*words, "--batch-size", 4)


def test_a_schedule_its_table_and_a_plot(run: Command, basic: tuple[object, ...], tmp_path: Path) -> None:
    answer = run("tune", *basic, "--flops", 0.7, "--images", 4, "--json", "--plot", "points.svg")
    assert answer.code == 0, answer.err
    assert answer.err == ""
    found = json.loads(answer.out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["points.svg", "schedule.json"]
    assert found["schedule"] == json.loads(Path("schedule.json").read_text())
    assert "tuned" in Path("points.svg").read_text()
    schedule = read_schedule("schedule.json")
    assert (schedule.method, schedule.images, schedule.seed, schedule.model) == ("ward", 4, 0, "test_vit")
    assert schedule.flops == pytest.approx(0.7, abs=0.02)
    best = next(point for point in found["points"] if point["budget"] == 0.7)
    assert best["tuned"] == list(schedule.r)
    assert all(point["kl"] <= point["default_kl"] for point in found["points"])


@pytest.fixture
def schedule(tmp_path: Path) -> Path:
    path = tmp_path / "found.json"
    Schedule(method="ward", depth=6, tokens=101, protected=1, r=(0, 9, 0, 20, 5, 0), options={"rounds": 2}).write(path)
    return path


def found(rows: list[dict[str, Any]], name: str) -> tuple[str, list[int]]:
    (row,) = (row for row in rows if name in row.values())
    return "ward", row["r"]


COMMANDS: list[tuple[str, Callable[[Any], tuple[str, list[int]]]]] = [
    ("plan test_vit --json", lambda facts: (facts["method"], facts["r"])),
    ("eval {basic} --json", lambda facts: found(facts["rows"], "ward (found)")),
    ("compare {basic} --methods tome --json", lambda facts: found(facts["rows"], "ward (found)")),
    ("bench test_vit --rounds 1 --batch 1 --json", lambda facts: found(facts["tables"][0]["rows"], "ward")),
    ("visualize {picture} --model {basic_model} --json", lambda facts: (facts["method"], facts["r"])),
]


@pytest.mark.parametrize(("line", "read"), COMMANDS, ids=[line.split()[0] for line, _ in COMMANDS])
def test_commands_take_a_schedule(
    run: Command, basic: tuple[object, ...], schedule: Path, line: str, read: Callable[[Any], tuple[str, list[int]]]
) -> None:
    words = {"basic": basic, "picture": (Path(str(basic[2])) / "0.jpg",), "basic_model": (basic[0], *basic[3:5])}
    parts = [each for word in line.split() for each in (words[word[1:-1]] if word.startswith("{") else (word,))]
    answer = run(*parts, "--schedule", schedule)
    assert answer.code == 0, answer.err
    assert read(json.loads(answer.out)) == ("ward", [0, 9, 0, 20, 5, 0])


def test_a_schedule_has_a_row_of_its_own(run: Command, basic: tuple[object, ...], schedule: Path) -> None:
    answer = run("eval", *basic, "--schedule", schedule, "--flops", 0.7, "-m", "ward,tome", "--json")
    assert [row["method"] for row in json.loads(answer.out)["rows"]] == ["baseline", "ward (found)", "ward", "tome"]


@pytest.mark.slow
def test_an_interrupted_search_continues(
    run: Command, basic: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("tune", *basic, "--flops", 0.7, "--images", 4, "--seed", 1)
    assert run(*words, "-o", "whole.json").code == 0
    measure, calls = mctf.evaluation.kl_meter.KLMeter._measure, []

    def counted(*given: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        measure(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(mctf.evaluation.kl_meter.KLMeter, "_measure", counted)
    assert run(*words).code == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["schedule.json.progress", "whole.json"]
    before = len(calls)
    assert run(*words).code == 0
    resumed = len(calls) - before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["schedule.json", "whole.json"]
    assert read_schedule("schedule.json").r == read_schedule("whole.json").r
    calls.clear()
    calls.extend([1] * 3)
    assert run(*words, "-o", "again.json").code == 0
    assert len(calls) - 3 > resumed


def test_an_aim_out_of_reach_leaves_no_file(run: Command, basic: tuple[object, ...], tmp_path: Path) -> None:
    words = ("tune", *basic, "--images", 4, "--max-kl", 1e-12)
    assert "a KL of 1e-12 is out of reach" in run.refusal(*words)
    assert list(tmp_path.iterdir()) == []
    run.refusal(*words, "--cache", "scores")
    assert [path.name for path in tmp_path.iterdir()] == ["scores"], "kept where it was asked for"
    Path("scores").rename("schedule.json.progress")
    run.refusal(*words)
    assert [path.name for path in tmp_path.iterdir()] == ["schedule.json.progress"], "of an earlier search"


@pytest.mark.slow
def test_scores_serve_other_budgets_and_no_other_images(run: Command, basic: tuple[object, ...]) -> None:
    words = ("tune", *basic, "--images", 4, "--cache", "scores")
    assert run(*words, "--flops", 0.7).code == 0
    size = Path("scores").stat().st_size
    assert run(*words, "--max-kl", 0.5).code == 0
    assert Path("scores").stat().st_size > size
    for other in (("--seed", 3), ("--images", 5), ("--method", "tome"), ("--option", "rounds=2"), ("--batch-size", 2)):
        message = run.refusal(*words, "--flops", 0.7, *other)
        assert "scores holds scores of other images, weights or settings: remove it" in message


def test_the_table(run: Command, basic: tuple[object, ...]) -> None:
    answer = run("tune", *basic, "--images", 4, "--flops", 0.7, "-o", "a.json")
    assert answer.out.startswith("test_vit, ward, KL on 4 images of ")
    assert ">: the schedule that is written, r = " in answer.out
    assert answer.out.endswith("schedule: a.json\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "there must be one aim"),
        (("--flops", 0.7, "--max-kl", 0.1), "there must be one aim"),
        (("--flops", 0.01), "ward cannot keep as little as 0.01"),
        (("--flops", 0.7, "--method", "ats"), "keeps as many tokens as each image needs"),
        (("--flops", 0.7, "--method", "dynamic_vit"), "has learned layers"),
        (("--flops", 0.7, "--plot", "a.txt"), "neither .png nor .svg"),
        (("--flops", 0.7, "--plot", "schedule.json"), "is to be written twice"),
        (("--flops", 0.7, "--cache", "schedule.json"), "is to be written twice"),
    ],
)
def test_refused(run: Command, basic: tuple[object, ...], words: tuple[object, ...], says: str, tmp_path: Path) -> None:
    assert says in run.refusal("tune", *basic, *words)
    assert list(tmp_path.iterdir()) == []
