"""`mctf export`, and `mctf eval` and `mctf bench` on exported files."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import Command
from helpers.exporting import HALF, tiny
from helpers.images import write_folder
from mctf.deploy import benchmark
from mctf.deploy.export import ExportReport
from mctf.errors import MctfError
from mctf.models import loading


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.mark.slow
def test_export_then_eval(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    model.pretrained_cfg = {"input_size": (3, 64, 64), "mean": HALF, "std": HALF}
    monkeypatch.setattr(loading, "load_described", lambda *_, **__: (model, "random"))
    file, images = tmp_path / "tiny.pt2", write_folder(tmp_path / "images", "a/0.png", "a/1.png", "b/0.png")
    words = ("test_vit", "--random-weights", "-m", "tome", "-r", 4, "--blocks", "0", "--output", file)
    outcome = run("export", *words, "--data", images)
    assert outcome.code == 0, outcome.err
    assert "against the model in PyTorch, float32, on 3 images" in outcome.out
    assert "file, batch 1: median |difference|" in outcome.out
    assert "PyTorch in float64" in outcome.out
    outcome = run("eval", file, "--data", images, "--batch-size", 2, "--json")
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    (row,) = facts["rows"]
    assert facts["images"] == 3
    assert row["method"] == "tome (pt2)"
    assert row["images_per_second"] > 0
    assert row["kl"] is None


def test_eval_of_a_file_takes_no_method(run: Command, pt2_file: Path, tmp_path: Path) -> None:
    images = write_folder(tmp_path / "images", "a/0.png")
    assert "exported as it is fused" in run.refusal("eval", pt2_file, "--data", images, "-r", 4)
    assert "omit --weights" in run.refusal("eval", pt2_file, "--data", images, "--image-size", 64)


def test_eval_of_a_file_that_says_nothing_about_its_images(run: Command, pt2_file: Path, tmp_path: Path) -> None:
    images = write_folder(tmp_path / "images", "a/0.png")
    assert "does not say how its images are prepared" in run.refusal("eval", pt2_file, "--data", images)


def test_bench_of_files(run: Command, pt2_file: Path) -> None:
    outcome = run("bench", pt2_file, pt2_file, "--batch", "1,2", "--rounds", 1, "--json")
    assert outcome.code == 0, outcome.err
    tables = json.loads(outcome.out)["tables"]
    assert [table["rows"][1]["batch"] for table in tables] == [1, 2]
    for table in tables:
        first, second = table["rows"]
        assert first["kl"] is None
        assert second["kl"] == pytest.approx(0, abs=1e-9)
        assert first["bytes"] == second["bytes"] == pt2_file.stat().st_size


@pytest.mark.slow
def test_bench_names_the_versions_of_the_runtime(run: Command, onnx_file: ExportReport) -> None:
    facts = json.loads(run("bench", onnx_file.path, "--rounds", 1, "--json").out)
    assert {"torch", "onnx", "onnxruntime"} <= facts["versions"].keys()


def test_a_format_that_fails_is_left_out(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MctfError("no such operator")

    monkeypatch.setattr(loading, "load_described", lambda *_, **__: (tiny(depth=1), "random"))
    monkeypatch.setattr(benchmark, "export", fail)
    words = ("bench", "test_vit", "-m", "tome", "-r", 2, "--batch", 2, "--rounds", 1, "--format")
    outcome = run(*words, "torch,pt2", "--json")
    assert outcome.code == 0, outcome.err
    (table,) = json.loads(outcome.out)["tables"]
    assert [row["format"] for row in table["rows"]] == ["torch", "torch"]
    assert table["notes"][:2] == [
        f"{name}, pt2, fp32 is left out: no such operator" for name in ("unfused", "tome, r=2")
    ]
    assert run.refusal(*words, "pt2").endswith("no such operator")


def test_export_replaces_no_input(run: Command, tmp_path: Path) -> None:
    weights, target = tmp_path / "tiny.bin", tmp_path / "tiny.xml"
    weights.touch()
    target.touch()
    refusal = run.refusal("export", "test_vit", "--weights", weights, "--output", target)
    assert "tiny.bin is an input of this command" in refusal


@pytest.mark.slow
def test_bench_over_formats(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_described", lambda *_, **__: (tiny(), "random"))
    outcome = run("bench", "test_vit", "--format", "torch,pt2", "-m", "tome", "-r", 2, "--batch", 2, "--rounds", 1)
    assert outcome.code == 0, outcome.err
    for name in ("unfused, torch", "tome, r=2, torch", "unfused, pt2", "tome, r=2, pt2"):
        assert name in outcome.out
