"""int8 in exported files and in benchmarks, and --precision of the commands."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import mctf
from helpers.command_line import Command
from helpers.exporting import fused, tiny
from helpers.images import write_folder
from helpers.models import make_images, run
from mctf.deploy.benchmark import FormatMeasurement, verdict
from mctf.deploy.parity import generated_images
from mctf.evaluation.fidelity import kl_divergence
from mctf.models import loading


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setattr(loading, "load_described", lambda *_, **__: (tiny(), "random"))
    return Command(monkeypatch, capsys)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images", "a/0.png", "a/1.png", "b/0.png")


def close_to(path: Path, model: Any) -> None:
    exported, inputs = mctf.load_exported(path), make_images(model, 3)
    assert exported.metadata.precision == "int8"
    assert exported.metadata.dtype == "float32"
    with torch.no_grad():
        expected = run(model, inputs)
    for batch in (1, 3):
        kl = kl_divergence(expected[:batch].double(), exported(inputs[:batch]).double()).mean()
        assert 0 < kl < 0.05


@pytest.mark.slow
def test_an_onnx_file_in_int8(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = fused(rounds=2)
    shown = generated_images(mctf.export(model, tmp_path / "full.onnx", check=False).metadata, 8)
    report = mctf.export(model, tmp_path / "int8.onnx", precision="int8", calibration=shown, name="tiny")
    close_to(report.path, model)
    assert report.bytes < (tmp_path / "full.onnx").stat().st_size
    nodes = onnx.load(report.path).graph.node
    makers = {name: node for node in nodes for name in node.output}
    quantized = [
        node
        for node in nodes
        if node.op_type in ("MatMul", "Gemm")
        and all(makers.get(name) is not None and makers[name].op_type == "DequantizeLinear" for name in node.input[:2])
    ]
    assert len(quantized) == 4 * 2 - 1  # of two blocks; of the trimmed last one, q and k v are cut from the weight
    assert not any("head" in name for node in quantized for name in node.input)
    assert sum(node.op_type == "QuantizeLinear" for node in nodes) <= len(quantized)  # inputs; outputs stay float32


def weight_bytes(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        entries = [each for each in archive.infolist() if "/data/" in each.filename]
        return sum(each.file_size for each in entries if Path(each.filename).name.startswith(("weight_", "tensor_")))


@pytest.mark.nightly
@pytest.mark.slow
def test_a_pt2_file_in_int8(tmp_path: Path) -> None:
    model = fused(method="tome")
    full = mctf.export(model, tmp_path / "full.pt2", "pt2", check=False)
    report = mctf.export(model, tmp_path / "int8.pt2", "pt2", precision="int8")
    close_to(report.path, model)
    assert weight_bytes(report.path) < 0.6 * weight_bytes(full.path)
    assert mctf.Quantization.of(model) is None  # the model is not changed


def test_refusals_of_export(tmp_path: Path) -> None:
    model = tiny(depth=1)
    for options, message in (
        ({"precision": "fp8"}, "exported files are never fp8"),
        ({"precision": "int4"}, "precision 'int4' is unknown: did you mean 'int8'"),
        ({"precision": 8}, "precision 8 is unknown: choose from"),
        ({"precision": "int8", "dtype": "bfloat16"}, "contradict each other"),
        ({"precision": "int8"}, "onnx in int8 needs calibration images"),
        ({"precision": "int8", "calibration": torch.zeros(0, 3, 64, 64)}, "calibration should be a tensor of"),
    ):
        with pytest.raises(mctf.MctfError, match=message):
            mctf.export(model, tmp_path / "tiny.onnx", **options)
    assert list(tmp_path.iterdir()) == []


def test_refusals_of_the_commands(command: Command, images: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, data = "test_vit", ("--data", images)
    target = ("--output", tmp_path / "tiny.onnx", "--random-weights")
    for words, message in (
        (("export", model, *target, "--precision", "fp8"), "never fp8"),
        (("export", model, *target, "--precision", "int8"), "add --calibration IMAGES"),
        (("export", model, *target, "--calibration", images), "add --precision int8"),
        (("export", model, *target, "--precision", "int8", "--calibration", tmp_path / "none"), "none"),
        (("eval", model, *data, "--precision", "fp8"), "add --calibration IMAGES"),
        (("eval", model, *data, "--precision", "int9"), "precision 'int9' is unknown"),
        (("eval", model, *data, "--precision", ","), "--precision is empty"),
        (("eval", model, *data, "--precision", "bf16"), "add --dtype bfloat16"),
        (("eval", model, *data, "--max-kl", "0.1"), "add --precision fp8 or int8"),
        (("bench", model, "--format", "torch", "--precision", "fp8"), "choose --precision fp32,int8"),
        (("bench", model, "--format", "torch", "--calibration", images), "add --precision fp32,int8"),
        (("bench", model, "--precision", "int8", "--calibration", images), "are for --format"),
        (("bench", model, "--precision", "fp8", "--training"), "leave out --training, or --precision"),
    ):
        assert message in command.refusal(*words)
    assert not (tmp_path / "tiny.onnx").exists()


def test_eval_in_fp8_and_int8(command: Command, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mctf.evaluation.setup.load_model", lambda *_, **__: tiny())
    words = ("eval", "test_vit", "--data", images, "-m", "ward", "-r", "0,0.2", "--precision", "fp32,fp8,int8")
    outcome = command(*words, "--calibration", images)
    assert outcome.code == 0, outcome.err
    assert "ward, fp8" in outcome.out
    assert "8 of 8 linear layers in the blocks, 100% of their FLOPs, emulated" in " ".join(outcome.out.split())
    rows = json.loads(command(*words, "--calibration", images, "--json").out)["rows"]
    assert [row["precision"] for row in rows] == [None, "fp8", "int8"] * 2
    for row, before in zip(rows, [rows[0]] * 3 + [rows[3]] * 3, strict=True):
        if row["precision"] is None:
            assert row["kl_added"] is row["kl_unquantized"] is None
            continue
        assert row["kl_added"] == pytest.approx(row["kl"] - before["kl"])
        assert row["kl_unquantized"] > 0
        assert row["quantized_share"] == 1
    assert rows[1]["kl_added"] == pytest.approx(rows[1]["kl_unquantized"])  # of the baseline they are the same


def test_bench_of_models(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mctf.evaluation.benchmark._repeats", lambda *_: 1)
    words = ("bench", "test_vit", "-m", "tome", "-r", 4, "--rounds", 1, "--batch", 2, "--precision", "fp32,fp8,int8")
    outcome = command(*words, "--json")
    assert outcome.code == 0, outcome.err
    (table,) = json.loads(outcome.out)["tables"]
    shown = [(row["name"], row["precision"], row["emulated"]) for row in table["rows"]]
    names = ["baseline", "tome", "free_drop"]
    assert shown[:3] == [(name, None, False) for name in names]
    assert shown[3:5] == [(name, "fp8", True) for name in names[:2]]
    assert shown[5:] == [(name, "int8", False) for name in names[:2]]
    assert all(row["difference"] < 0.01 for row in table["rows"][3:])


@pytest.mark.nightly
@pytest.mark.slow
def test_bench_over_formats_and_precisions(command: Command, images: Path) -> None:
    words = ("bench", "test_vit", "--format", "torch,pt2", "-m", "tome", "-r", 2, "--batch", 2, "--rounds", 1)
    outcome = command(*words, "--precision", "fp32,int8", "--calibration", images, "--json")
    assert outcome.code == 0, outcome.err
    (table,) = json.loads(outcome.out)["tables"]
    rows = table["rows"]
    assert len(rows) == 2 * 2 * 2
    assert [row["precision"] for row in rows] == ["fp32", "int8"] * 4
    for full, int8 in zip(rows[::2], rows[1::2], strict=True):
        assert int8["format"] == "pt2" or int8["bytes"] < 0.6 * full["bytes"]  # a tiny pt2 file is mostly graph
        assert int8["name"] == f"{full['name']}, int8"


def test_the_verdict_names_what_does_not_pay() -> None:
    def row(name: str, precision: str, milliseconds: float) -> FormatMeasurement:
        return FormatMeasurement(name, "onnx", None, None, precision, 1, milliseconds, 0, 1, 1, 1, 1, None, None)

    full = row("unfused, onnx", "fp32", 10)
    assert verdict([full]) == []
    assert verdict([full, row("unfused, onnx, int8", "int8", 5)]) == [
        "unfused, onnx, int8: 2.00x the speed of unfused, onnx"
    ]
    (line,) = verdict([full, row("unfused, onnx, int8", "int8", 20)])
    assert "does not pay here: 0.50x the speed of unfused, onnx" in line
