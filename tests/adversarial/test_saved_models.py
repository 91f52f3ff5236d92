"""Bad files for mctf.load: MctfError in one line, whatever a config or weights file holds."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import mctf
from mctf.fusion_record import FusionRecord

Record = Callable[[str, object], None]


def change(key: str, value: Any, *, fusion: bool = False) -> Callable[[Path], None]:
    """A change of one entry of a config file."""

    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (config["mctf"] if fusion else config)[key] = value
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def write(content: bytes, name: str = "config.json") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no_config": (lambda folder: (folder / "config.json").unlink(), "cannot be read (No such file"),
    "no_weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot be read (No such file"),
    "empty": (write(b""), "is not JSON"),
    "no_json": (write(b"{"), "is not JSON"),
    "binary": (write(b"\x80\x04\xff"), "is not JSON"),
    "deep": (write(b"[" * 100_000), "is not JSON"),
    "list": (write(b"[1]"), "holds [1]"),
    "no_fusion": (write(b'{"architecture": "test_vit"}'), "holds no fusion"),
    "fusion_is_text": (change("mctf", "x"), "its fusion is 'x'"),
    "fusion_is_empty": (change("mctf", {}), "has version None"),
    "later_version": (change("version", 2, fusion=True), "has version 2, and this mctf reads version 1: update mctf"),
    "version_is_true": (change("version", True, fusion=True), "has version True"),
    "method_is_number": (change("method", 3, fusion=True), "its method is 3"),
    "unknown_method": (change("method", "tomee", fusion=True), "did you mean 'tome'?"),
    "options_are_list": (change("options", [], fusion=True), "its options is []"),
    "unknown_option": (change("options", {"x": 1}, fusion=True), "has no option 'x'"),
    "r_is_text": (change("r", "x", fusion=True), "r='x' is not a preset"),
    "r_is_none": (change("r", None, fusion=True), "r must be a number"),
    "r_of_another_depth": (change("r", [1, 2], fusion=True), "r has 2 entries but the model has 6 blocks"),
    "fused_r_of_another_depth": (change("fused_r", [1, 2], fusion=True), "r has 2 entries but the model has 6 blocks"),
    "negative_r": (change("r", -1, fusion=True), "is negative"),
    "blocks_are_text": (change("blocks", "1", fusion=True), "its blocks is '1'"),
    "blocks_of_another_depth": (change("blocks", [40], fusion=True), "the model has blocks 0 to 5"),
    "dense_is_text": (change("dense", "no", fusion=True), "its dense is 'no'"),
    "trim_is_text": (change("trim_last", "no", fusion=True), "its trim_last is 'no'"),
    "depth_of_another_model": (change("depth", 24, fusion=True), "the fusion is for 24 blocks, and the model has 6"),
    "unknown_model": (change("architecture", "test_vitt"), "timm has no model 'test_vitt'"),
    "model_is_number": (change("architecture", 3), "its architecture is 3"),
    "model_elsewhere": (change("architecture", "local-dir:/tmp"), "timm has no model"),
    "another_model": (change("architecture", "test_vit2"), "holds weights of another model"),
    "classes_of_another_model": (change("num_classes", 3), "holds weights of another model"),
    "classes_are_text": (change("num_classes", "x"), "its num_classes is 'x'"),
    "dtype_is_unknown": (change("dtype", "int8"), "its dtype is 'int8'"),
    "args_load_a_file": (change("model_args", {"checkpoint_path": "x.pt"}), "cannot hold 'checkpoint_path'"),
    "args_are_text": (change("model_args", "x"), "is 'x'"),
    "args_are_unknown": (change("model_args", {"colour": 1}), "cannot be created with"),
    "args_are_wrong": (change("model_args", {"depth": "x"}), "cannot be created"),
    "cfg_is_list": (change("pretrained_cfg", [1]), "its pretrained_cfg is [1]"),
    "weights_changed": (write(b"x", "model.safetensors"), "holds other weights than those that"),
    "checksum_changed": (change("weights", "00"), "holds other weights than those that"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    mctf.save(mctf.fuse(timm.create_model("test_vit"), r=8), place)
    return place


def refuse(path: Path, text: str) -> None:
    with pytest.raises(mctf.MctfError, match=re.escape(text)) as caught:
        mctf.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, folder: Path, tmp_path: Path, record_property: Record) -> None:
    damage, text = BAD[case]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damage(copy)
    refuse(copy, text)
    record_property("cases", ["saved", 1])


NONSENSE: list[Any] = [
    None,
    True,
    -1,
    1e400,
    10**400,
    "x",
    "a\nb\x1b[31m",
    "x" * 10_000,
    [],
    [[1]],
    {},
    {"a": [1]},
    ["x"] * 6,
]


@pytest.mark.parametrize("key", ["architecture", "num_classes", "model_args", "pretrained_cfg", "dtype", "weights"])
def test_nonsense_in_a_config(key: str, folder: Path, tmp_path: Path, record_property: Record) -> None:
    check_nonsense(key, folder, tmp_path, fusion=False)
    record_property("cases", ["saved", len(NONSENSE)])


@pytest.mark.parametrize("key", ["version", *(each.name for each in fields(FusionRecord))])
def test_nonsense_in_a_fusion(key: str, folder: Path, tmp_path: Path, record_property: Record) -> None:
    check_nonsense(key, folder, tmp_path, fusion=True)
    record_property("cases", ["saved", len(NONSENSE)])


def check_nonsense(key: str, folder: Path, tmp_path: Path, *, fusion: bool) -> None:
    """Each value is refused in one line, or means something."""
    shutil.copy(folder / "model.safetensors", tmp_path)
    for value in NONSENSE:
        shutil.copy(folder / "config.json", tmp_path)
        change(key, value, fusion=fusion)(tmp_path)
        message = ""
        try:
            loaded: Any = mctf.load(tmp_path)
        except mctf.MctfError as refusal:
            message = str(refusal)
        else:
            assert loaded(torch.zeros(1, 3, 160, 160)).isfinite().all()
        assert "\n" not in message
        assert len(message) < 2000


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    from helpers.models import make

    place = tmp_path_factory.mktemp("hf")
    mctf.fuse(make("hf_vit"), r=8).save_pretrained(place)
    return place


BAD_HF: dict[str, tuple[Callable[[Path], object], str]] = {
    "no_fusion": (change("mctf", None), "holds no fusion"),
    "unknown_method": (change("method", "tomee", fusion=True), "did you mean 'tome'?"),
    "another_depth": (change("depth", 12, fusion=True), "the fusion is for 12 blocks, and the model has 4"),
    "options_of_another_method": (change("method", "dynamic_vit", fusion=True), "has no option"),
    "no_class": (change("architectures", None), "names no class of transformers, but None"),
    "other_class": (change("architectures", ["x"]), "names no class of transformers, but 'x'"),
    "no_model": (change("architectures", ["ViTConfigg"]), "names no class of transformers"),
    "no_type": (change("model_type", "x"), "cannot be loaded"),
    "no_weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
    "empty_weights": (write(b"", "model.safetensors"), "is empty"),
    "other_shapes": (change("hidden_size", 24), "cannot be loaded"),
}


@pytest.mark.parametrize("case", BAD_HF)
def test_bad_folders_of_transformers(case: str, hf_folder: Path, tmp_path: Path, record_property: Record) -> None:
    damage, text = BAD_HF[case]
    copy = tmp_path / "copy"
    shutil.copytree(hf_folder, copy)
    damage(copy)
    refuse(copy, text)
    record_property("cases", ["saved", 1])


@pytest.mark.parametrize(
    "source", [3, None, "", "a\0b", "./absent", "/absent/folder", "absent.safetensors", "a/b/c", b"x"]
)
def test_sources_that_are_none(source: Any) -> None:
    with pytest.raises(mctf.MctfError, match=r"give a file or folder that mctf\.save or save_pretrained wrote"):
        mctf.load(source)
