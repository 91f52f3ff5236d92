"""Tiny models and their exported files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mctf
from helpers.models import make
from mctf.deploy.export import ExportReport

Exporter = Callable[..., ExportReport]


def fused(name: str = "plain", method: str = "ward", **options: Any) -> Any:
    """A tiny model that fuses in the first of its blocks."""
    return mctf.fuse(tiny(name), method, r=3, blocks=[0], **options)


def tiny(name: str = "plain", *, depth: int = 2) -> Any:
    """A model of few blocks: exporting takes a second per block."""
    return make(name) if name.startswith("hf_") else make(name, depth=depth)


@pytest.fixture(scope="session")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    """A tiny model fused by ward, as an ONNX file."""
    pytest.importorskip("onnxruntime")
    path = tmp_path_factory.mktemp("onnx") / "tiny.onnx"
    return mctf.export(fused(rounds=2), path, name="tiny")


@pytest.fixture(scope="session")
def pt2_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny unfused model, as a file of torch.export: the fastest to write."""
    path = tmp_path_factory.mktemp("pt2") / "tiny.pt2"
    mctf.export(tiny(depth=1), path, "pt2", check=False)
    return path
