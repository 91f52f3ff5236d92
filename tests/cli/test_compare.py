"""`mctf compare`: its JSON object, file and plot, its table, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

import mctf
from helpers.command_line import Command
from helpers.images import write_folder
from mctf.cli.compare import _known_methods

METHODS = ("mctf", "mctf_exact", "tome", "dynamic_vit", "a_vit", "ia_red2")
OWN_COST = {"a_vit", "ia_red2"}
TARGET = 0.024  # GFLOPs; test_vit has 0.038
LOW = 0.0175  # out of reach of EViT, which acts in three of its six blocks
TOLERANCE = 0.02  # one token of test_vit, which has a hundred, is about one percent of a block


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd, "compare")


@pytest.fixture(scope="module")
def basic(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Arguments that every call begins with."""
    folder = tmp_path_factory.mktemp("compare")
    write_folder(folder / "pictures", *(f"{name}/{index}.jpg" for name in ("cat", "dog", "emu") for index in range(2)))
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=3).state_dict(), folder / "tiny.safetensors")
    words = ("test_vit", "--data", folder / "pictures", "--weights", folder / "tiny.safetensors")
    return (*words, "--batch-size", 4)


def test_json_in_a_file_and_a_plot(run: Command, basic: tuple[object, ...], tmp_path: Path) -> None:
    files = ("--output", tmp_path / "found.json", "--plot", tmp_path / "found.svg")
    answer = run(*basic, "--gflops", f"{TARGET},9,0.03", "--methods", ",".join(METHODS), "--json", *files)
    assert answer.code == 0, answer.err
    assert answer.err == ""
    found = json.loads(answer.out)
    assert found == json.loads((tmp_path / "found.json").read_text())
    assert found["images"] == 6
    assert found["targets"] == [TARGET, 9, 0.03]
    assert found["baseline"]["kl"] == 0
    assert {row["method"] for row in found["rows"]} == set(METHODS)
    ranked = [row for row in found["rows"] if row["target_gflops"] is not None]
    keys = [(row["target_gflops"], row["kl"]) for row in ranked]
    assert keys == sorted(keys)
    assert all(row["gflops"] == pytest.approx(row["target_gflops"], rel=TOLERANCE) for row in ranked)
    assert {row["method"] for row in found["rows"][len(ranked) :]} == OWN_COST
    assert {each["method"] for each in found["refusals"]} == {row["method"] for row in ranked}
    assert all(each["target"] == 9 for each in found["refusals"])
    assert sum("is closest to the baseline" in line for line in found["verdicts"]) == 2
    drawing = (tmp_path / "found.svg").read_text()
    assert "mctf_exact" in drawing
    assert "dynamic_vit (untrained)" in drawing
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.svg"]


@pytest.mark.parametrize("word", ["--trim-last", "--no-trim-last"])
def test_the_last_block_is_trimmed_at_equal_cost(run: Command, basic: tuple[object, ...], word: str) -> None:
    answer = run(*basic, "--gflops", TARGET, "--methods", "tome,ward", word, "--json")
    assert answer.code == 0, answer.err
    model = timm.create_model("test_vit", num_classes=3)
    for row in json.loads(answer.out)["rows"]:
        planned = mctf.plan(model, method=row["method"], r=row["r"], trim_last=word == "--trim-last")
        assert row["gflops"] == planned.gflops == pytest.approx(TARGET, rel=TOLERANCE)
        assert planned.trimmed == (word == "--trim-last")


def test_a_table_verdicts_refusals_and_notes(run: Command, basic: tuple[object, ...]) -> None:
    answer = run(*basic, "--gflops", LOW, "--methods", "tome,mctf,evit,dynamic_vit,a_vit,tome")
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    heading = next(line for line in lines if "agree" in line)
    assert all(word in heading for word in ("method", "KL", "GFLOPs", "images/s", "target", "remark"))
    table = [line.split() for line in lines if line.strip().endswith(("parameter-free", "untrained"))]
    assert sorted(row[0] for row in table) == ["dynamic_vit", "mctf", "tome"]
    assert [row[5] for row in table] == sorted(row[5] for row in table)
    assert next(line.split() for line in lines if line.startswith(" a_vit"))[-2:] == ["none", "learned"]
    remarks = {line[heading.index("remark") :].strip() for line in lines if line.startswith((" tome", " a_vit"))}
    assert remarks == {"parameter-free", "learned"}  # words begin below their heading
    assert "GFLOPs whatever r is: it is not ranked" in answer.out
    assert f"at {LOW} GFLOPs " in answer.out
    assert "lowest KL of the parameter-free methods" in answer.out
    assert f"not compared: evit: evit cannot cost {LOW} GFLOPs" in answer.out
    assert "note: images/s: median over full batches" in answer.out


def test_runs_are_alike(run: Command, basic: tuple[object, ...]) -> None:
    words = (*basic, "--gflops", TARGET, "--methods", "dynamic_vit", "--limit", 3, "--json")
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        losses.append(json.loads(run(*words).out)["rows"][0]["kl"])
    assert losses[0] == losses[1] > 0


def test_all_are_all_registered_methods() -> None:
    assert _known_methods(["all"]) == list(mctf.methods())
    assert _known_methods(["tome", "mctf", "tome"]) == ["tome", "mctf"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--gflops", "much"], "--gflops 'much' is not a list of positive numbers"),
        (["--gflops", "0.02,-1"], "is not a list of positive numbers"),
        (["--gflops", "nan"], "is not a list of positive numbers"),
        (["--gflops", "0.02", "--methods", "mctv"], "unknown method 'mctv': did you mean 'mctf'?"),
        (["--gflops", "0.02", "--methods", ","], "there is nothing to compare"),
        (["--gflops", "0.02", "--plot", "found.pdf"], "found.pdf is neither .png nor .svg"),
        (["--gflops", "9", "--methods", "mctf"], "no method can be compared: mctf cannot cost 9 GFLOPs"),
        ([], "--gflops"),
    ],
)
def test_refuses(run: Command, basic: tuple[object, ...], words: list[str], complaint: str) -> None:
    assert complaint in run.refusal(*basic, *words)


def test_a_plot_without_matplotlib_is_refused_before_the_work(
    run: Command, basic: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("mctf.evaluation.setup.open_run", lambda *_: pytest.fail("the run was opened"))
    line = run.refusal(*basic, "--gflops", TARGET, "--plot", tmp_path / "found.svg")
    assert "plots need matplotlib, which is not installed: pip install 'mctf[report]'" in line
