"""mctf.save and mctf.load of timm models: the fusion comes back, other readers see the unfused model, bad files are
refused in one line."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

import mctf
import mctf.models  # registers `embedded_small` with timm
from helpers.learned import teach
from helpers.shared_data import SHARED, needs_shared
from mctf.api import find_stack
from mctf.methods import _REGISTRY
from mctf.methods._layers import UntrainedWarning
from mctf.methods.tome import ToMe
from mctf.models.loading import load_model

IMAGES = torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(3))


def tiny(**options: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model("test_vit", **options).eval()


def saved(model: nn.Module, path: Path, **options: Any) -> Any:
    """The model after a round trip through files."""
    mctf.save(model, path, **options)
    return mctf.load(path)


@pytest.mark.parametrize("method", _REGISTRY)
@torch.no_grad()
def test_every_method_comes_back(method: str, tmp_path: Path) -> None:
    model = tiny()
    if _REGISTRY[method].learned:
        with warnings.catch_warnings(action="ignore", category=UntrainedWarning):
            teach(model, method, _REGISTRY[method].default_r)
            mctf.fuse(model, method)
    else:
        mctf.fuse(model, method)
    loaded = saved(model, tmp_path / "model.safetensors")
    assert loaded.blocks.method == model.blocks.method
    assert loaded.blocks.schedule == model.blocks.schedule
    torch.manual_seed(1)
    expected = model(IMAGES)
    torch.manual_seed(1)
    assert torch.equal(loaded(IMAGES), expected)
    assert not loaded.training


SETTINGS: dict[str, dict[str, Any]] = {
    "options": {"method": "mctf", "r": 5, "tau_info": 0.1, "bidirectional": False, "pooling": "max"},
    "fast": {"r": "fast"},
    "ratio": {"r": 0.25, "blocks": (-1, 2)},
    "per_block": {"r": [0, 3, 0, 0.1, 0, 2]},
    "budget": {"method": "tome", "flops": 0.7, "blocks": [1, 3]},
    "dense": {"r": 4, "dense": True},
    "copied": {"r": 4, "dense": True, "restore": "copy"},
    "trimmed": {"method": "tome", "r": [0, 4, 0, 4, 0, 0], "trim_last": True},
}


@pytest.mark.parametrize("case", SETTINGS)
@torch.no_grad()
def test_every_setting_comes_back(case: str, tmp_path: Path) -> None:
    model = mctf.fuse(tiny(), **SETTINGS[case])
    loaded = saved(model, tmp_path / "model")
    for name in ("schedule", "method", "blocks", "dense", "trim_last", "restore"):
        assert getattr(loaded.blocks, name) == getattr(model.blocks, name), name
    assert torch.equal(loaded(IMAGES), model(IMAGES))
    r = [2, 0, 1, 0, 0, 0] if case == "per_block" else 3
    mctf.set_r(model, r)
    mctf.set_r(loaded, r)  # the chosen blocks are kept
    assert loaded.blocks.schedule == model.blocks.schedule


@torch.no_grad()
def test_r_changed_after_fusing_comes_back(tmp_path: Path) -> None:
    model = mctf.fuse(tiny(), r=8, blocks=(1, 3))
    mctf.set_r(model, [0, 0, 4, 0, 0, 0])
    loaded = saved(model, tmp_path / "model.safetensors")
    assert torch.equal(loaded(IMAGES), model(IMAGES))
    mctf.set_r(loaded, 2)
    assert loaded.blocks.schedule == (0, 2, 0, 2, 0, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"num_classes": 7},
        {"num_classes": 0},
        {"img_size": 96, "num_classes": 3},
        {"global_pool": "avg"},
        {"in_chans": 1},
    ],
    ids=str,
)
@torch.no_grad()
def test_what_a_model_was_created_with_is_found_out(options: dict[str, Any], tmp_path: Path) -> None:
    model = mctf.fuse(tiny(**options), r=6)
    loaded = saved(model, tmp_path / "model")
    size = options.get("img_size", 160)
    images = torch.randn(2, options.get("in_chans", 3), size, size)
    assert torch.equal(loaded(images), model(images))


@torch.no_grad()
def test_a_changed_head_image_size_and_dtype(tmp_path: Path) -> None:
    model = tiny()
    model.reset_classifier(5)
    model.set_input_size(img_size=96)
    mctf.fuse(model.to(torch.bfloat16), r=6)
    loaded = saved(model, tmp_path / "model")
    images = IMAGES[:, :, :96, :96].bfloat16()
    assert loaded(images).dtype == torch.bfloat16
    assert torch.equal(loaded(images), model(images))
    by_hand = tiny()
    by_hand.head = nn.Linear(by_hand.num_features, 9)  # num_classes still says 1000
    assert saved(mctf.fuse(by_hand), tmp_path / "model")(IMAGES).shape == (2, 9)


def test_what_cannot_be_found_out_is_asked_for(tmp_path: Path) -> None:
    model = mctf.fuse(tiny(drop_path_rate=0.1), r=6)
    with pytest.raises(
        mctf.MctfError, match=r"drop_path.*: pass model_args=\{…\} with what timm\.create_model was given"
    ):
        mctf.save(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())
    loaded = saved(model, tmp_path / "model", model_args={"drop_path_rate": 0.1})
    assert loaded.blocks[5].drop_path1.drop_prob == pytest.approx(0.1)


def test_an_attribute_of_the_user_does_not_matter(tmp_path: Path) -> None:
    model = mctf.fuse(tiny(), r=6)
    model.epoch = 3
    assert find_stack(saved(model, tmp_path / "model")) is not None
    model.blocks.get_submodule("2").attn.scale = 0.5
    with pytest.raises(mctf.MctfError, match=r"blocks\.2\.attn\.scale is 0\.5 here"):
        mctf.save(model, tmp_path / "model")


def test_a_compiled_model_is_saved(tmp_path: Path) -> None:
    model = torch.compile(mctf.fuse(tiny(), r=6))
    assert find_stack(saved(model, tmp_path / "model")) is not None


@torch.no_grad()
def test_other_readers_see_the_unfused_model(tmp_path: Path) -> None:
    model = tiny(num_classes=4)
    baseline = model(IMAGES)
    mctf.fuse(model, r=8)
    mctf.save(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    assert torch.equal(load_model("test_vit", weights=tmp_path / "model.safetensors")(IMAGES), baseline)
    assert torch.equal(timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()(IMAGES), baseline)


def test_preprocessing_comes_back(tmp_path: Path) -> None:
    model = mctf.fuse(tiny(), r=8)
    model.pretrained_cfg["mean"] = (0.1, 0.2, 0.3)
    loaded = saved(model, tmp_path / "model.safetensors")
    assert loaded.pretrained_cfg["mean"] == (0.1, 0.2, 0.3)
    assert loaded.pretrained_cfg["architecture"] == "test_vit"


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    def refused(model: nn.Module, text: str, path: Any = tmp_path / "model.safetensors", **options: Any) -> None:
        with pytest.raises(mctf.MctfError, match=text) as caught:
            mctf.save(model, path, **options)
        assert "\n" not in str(caught.value)
        assert not list(tmp_path.iterdir())

    fused = mctf.fuse(tiny(), r=8)
    refused(tiny(), "is not fused: run mctf.fuse")
    refused(nn.Sequential(fused), "Sequential has no name.*save the timm or transformers model inside it")
    refused(fused, "there is no folder", tmp_path / "absent" / "model.safetensors")
    refused(fused, "is no path", 3)
    refused(fused, "null byte", "a\0b")
    refused(fused, "model_args cannot hold 'checkpoint_path'", model_args={"checkpoint_path": "x.pt"})
    refused(fused, "model_args cannot hold 'act_layer'", model_args={"act_layer": nn.ReLU})
    refused(fused, "model_args is 'x'", model_args="x")
    pruned = mctf.fuse(tiny(), r=8)
    pruned.prune_intermediate_layers([2])
    refused(pruned, "test_vit by timm is not this model")
    mixed = mctf.fuse(tiny(), r=8)
    mixed.head.half()
    refused(mixed, "convert the model to one of float32")
    refused(mctf.fuse(tiny(), r=8).to("meta"), "cls_token has no values")
    odd = tiny()
    odd.head = nn.Sequential(nn.Linear(odd.num_features, 3), nn.ReLU())
    refused(mctf.fuse(odd), "test_vit by timm is not this model")


def test_a_method_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class OwnToMe(ToMe):
        name: ClassVar[str] = "own_tome"

    monkeypatch.setitem(_REGISTRY, "own_tome", OwnToMe)
    model = mctf.fuse(tiny(), "own_tome", r=8)
    assert isinstance(saved(model, tmp_path / "model.safetensors").blocks.method, OwnToMe)
    monkeypatch.delitem(_REGISTRY, "own_tome")
    with pytest.raises(mctf.MctfError, match="method 'own_tome' cannot be saved"):
        mctf.save(model, tmp_path / "other.safetensors")
    with pytest.raises(mctf.MctfError, match="unknown method 'own_tome'"):
        mctf.load(tmp_path / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    mctf.save(mctf.fuse(tiny(), r=8), place)
    return place


def test_a_model_without_a_record() -> None:
    with pytest.raises(mctf.MctfError, match="the config of VisionTransformer holds no fusion"):
        mctf.load(tiny())


def test_a_name_on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mctf.saving.cached_file", lambda name, files: str(folder / files[0]))
    assert find_stack(mctf.load("somebody/something")) is not None


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mctf.fuse(tiny(), r=8)
    writing = mctf.saving.atomic_write

    def fail(path: Path, content: bytes) -> None:
        if path.suffix == ".json":
            raise mctf.MctfError("the disk is full: make room")
        writing(path, content)

    monkeypatch.setattr("mctf.saving.atomic_write", fail)
    with pytest.raises(mctf.MctfError, match="the disk is full"):
        mctf.save(model, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@needs_shared("data/deit_tiny_patch16_224.safetensors")
@torch.no_grad()
def test_real_weights(tmp_path: Path) -> None:
    weights = SHARED / "data/deit_tiny_patch16_224.safetensors"
    model = mctf.fuse(load_model("deit_tiny_patch16_224", weights=weights), "ward", flops=0.56)
    images = torch.randn(2, 3, 224, 224)
    assert torch.equal(saved(model, tmp_path / "deit.safetensors")(images), model(images))
