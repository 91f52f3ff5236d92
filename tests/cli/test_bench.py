"""`mctf bench`: its JSON object and table, and what it refuses."""

import json
from pathlib import Path

import pytest

from helpers.command_line import Command
from mctf.evaluation import benchmark
from mctf.evaluation.benchmark import BASELINE, FREE_DROP


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setattr(benchmark, "_repeats", lambda *_: 1)  # one pass per timing: figures mean nothing in a test
    return Command(monkeypatch, capsys, "bench")


def test_every_contender_is_measured(bench: Command, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    words = ("-r", "8,fast", "-m", "mctf,tome", "--batch", "1,2", "--rounds", 1)
    outcome = bench("test_vit", *words, "--json", "--output", file)
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    assert facts == json.loads(file.read_text())
    assert len(facts["tables"]) == 4
    for table in facts["tables"]:
        rows = {row["name"]: row for row in table["rows"]}
        assert list(rows) == [BASELINE, "mctf", "tome", FREE_DROP]
        assert rows[BASELINE]["speedup"] == 1
        assert rows[FREE_DROP]["label"] == "free-drop upper bound"
        assert rows["mctf"]["difference"] < 1e-5
        assert all(row["images_per_second"] > 0 for row in rows.values())
        assert rows["mctf"]["gflops"] < rows[BASELINE]["gflops"]


def test_bounds_are_left_out_on_request(bench: Command) -> None:
    outcome = bench("test_vit", "-r", 8, "-m", "mctf,tome", "--batch", 1, "--rounds", 1, "--no-bounds", "--json")
    (table,) = json.loads(outcome.out)["tables"]
    assert [row["name"] for row in table["rows"]] == [BASELINE, "mctf", "tome"]
    assert all("upper bound" not in note and "convolution" not in note for note in table["notes"])
    refused = bench("test_vit", "--format", "torch", "--no-bounds")
    assert (refused.code, refused.out) == (2, "")
    assert "leave out --training, --compile, --no-bounds" in refused.err


def test_the_last_block_is_trimmed_on_request(bench: Command) -> None:
    words = ("-r", 8, "-m", "tome", "--rounds", 1, "--batch", 1, "--json")
    (trimmed,), (whole,) = (
        json.loads(bench("test_vit", *words, *more).out)["tables"] for more in (["--trim-last"], [])
    )
    assert trimmed["title"] == whole["title"] + ", trimmed last block"
    cheaper = [one["gflops"] < other["gflops"] for one, other in zip(trimmed["rows"], whole["rows"], strict=True)]
    assert cheaper == [False, True, False]  # the upper bound drops tokens before its last block, and is not trimmed


def test_training_is_timed_too(bench: Command) -> None:
    words = ("-r", 8, "-m", "mctf_exact", "--batch", 2, "--rounds", 2, "--training", "--json")
    facts = json.loads(bench("test_vit", *words).out)
    (table,) = facts["tables"]
    assert facts["training"]
    assert table["title"].endswith("forward and backward")
    assert [row["name"] for row in table["rows"]] == [BASELINE, "mctf_exact", FREE_DROP]


def test_the_table_has_a_title_and_verdicts(bench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "inconclusive", lambda _: None)  # one pass beside other tests is a noisy figure
    outcome = bench("test_vit", "-m", "mctf", "--rounds", 1)
    assert "test_vit, r=16, batch 8, 160x160, " in outcome.out
    assert "speed-up" in outcome.out
    assert "over matmul" not in outcome.out  # on a CPU there is one baseline
    assert "free-drop upper bound" in outcome.out
    assert "\nmctf r=16" in outcome.out


def test_both_baselines_have_a_column(bench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    original = benchmark.make_contenders
    monkeypatch.setattr(benchmark, "make_contenders", lambda *args, matmul: original(*args, matmul=True))
    lines = bench("test_vit", "-m", "mctf", "--rounds", 1).out.splitlines()
    heading = next(line for line in lines if "contender" in line)
    assert "over matmul" in heading
    assert any(line.strip().startswith("baseline, matmul patch embedding") for line in lines)
    assert max(map(len, lines[:10])) <= 120


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["test_vit", "--batch", "0"], "--batch '0' is not a list of positive numbers: write 1,8,64"),
        (["test_vit", "-m", "tomee"], "unknown method 'tomee': did you mean 'tome'?"),
        (["test_vit", "-r", "x"], "r='x' is no"),
        (["test_vit", "-r", ","], "name at least one r"),
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


def test_blocks_that_fuse_are_timed_and_named(bench: Command) -> None:
    line = ("embedded_small", "-m", "ward", "--flops", "0.8", "--blocks", "3,5", "--batch", 1, "--rounds", 1)
    (table,) = json.loads(bench(*line, "--json").out)["tables"]
    (ward,) = (row for row in table["rows"] if row["name"] == "ward")
    assert "flops=0.8 in blocks 3,5" in table["title"]
    assert ward["gflops"] / table["rows"][0]["gflops"] == pytest.approx(0.8, abs=0.005)
