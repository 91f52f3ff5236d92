"""Exported files that several tests read."""

import sys
from pathlib import Path
from typing import Any

import pytest

import mctf
from helpers.exporting import PREPROCESSING, fused, tiny
from mctf.deploy.export import ExportReport

modules: dict[str, Any] = sys.modules
modules.setdefault("openvino_telemetry", None)  # tests that import OpenVINO themselves report nothing either


@pytest.fixture(scope="session")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    """A tiny model fused by ward, as an ONNX file."""
    pytest.importorskip("onnxruntime")
    path = tmp_path_factory.mktemp("onnx") / "tiny.onnx"
    return mctf.export(fused(rounds=2), path, name="tiny", preprocessing=PREPROCESSING)


@pytest.fixture(scope="session")
def pt2_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny unfused model, as a file of torch.export: the fastest to write."""
    path = tmp_path_factory.mktemp("pt2") / "tiny.pt2"
    mctf.export(tiny(depth=1), path, "pt2", check=False)
    return path
