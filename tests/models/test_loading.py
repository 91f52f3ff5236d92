"""Models by name and weights from files."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from mctf import MctfError
from mctf.models import loading


@pytest.fixture
def model() -> nn.Module:
    return timm.create_model("test_vit", num_classes=3).eval()


@pytest.fixture
def weights(model: nn.Module, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.safetensors"
    save_file(model.state_dict(), path)
    return path


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def test_same_weights_can_fail(model: nn.Module) -> None:
    assert not same_weights(model, timm.create_model("test_vit", num_classes=3))
    assert not same_weights(model, timm.create_model("test_vit", num_classes=4))


class TestLoading:
    def test_a_file_decides_the_number_of_classes(self, model: nn.Module, weights: Path) -> None:
        loaded = loading.load_model("test_vit", weights=weights)
        assert same_weights(loaded, model)
        assert loaded.num_classes == 3
        assert not any(module.training for module in loaded.modules())
        assert same_weights(loading.load_model("test_vit", weights=str(weights)), model)

    def test_both_heads_of_a_distilled_model_follow(self, tmp_path: Path) -> None:
        tiny = {"embed_dim": 16, "depth": 1, "num_heads": 1}
        name = "deit_tiny_distilled_patch16_224"
        distilled = timm.create_model(name, num_classes=3, **tiny)
        assert loading._num_classes(distilled.state_dict(), timm.create_model(name, **tiny)) == 3

    @pytest.mark.parametrize("wrapper", [None, "model", "state_dict"])
    @pytest.mark.parametrize("prefix", ["", "module."])
    def test_wrapped_and_prefixed_files_are_read(
        self, model: nn.Module, tmp_path: Path, wrapper: str | None, prefix: str
    ) -> None:
        state = {prefix + name: value for name, value in model.state_dict().items()}
        torch.save(state if wrapper is None else {wrapper: state, "epoch": 3}, tmp_path / "tiny.pth")
        assert same_weights(loading.load_model("test_vit", weights=tmp_path / "tiny.pth"), model)

    def test_half_precision_files_fill_a_float32_model(self, model: nn.Module, tmp_path: Path) -> None:
        torch.save(model.half().state_dict(), tmp_path / "half.pt")
        loaded = loading.load_model("test_vit", weights=tmp_path / "half.pt")
        assert {value.dtype for value in loaded.parameters()} == {torch.float32}
        assert same_weights(loaded, model.float())

    def test_positions_are_resampled_for_another_image_size(self, model: nn.Module, weights: Path) -> None:
        loaded = loading.load_model("test_vit", weights=weights, image_size=(96, 128))
        assert loaded(torch.zeros(1, 3, 96, 128)).shape == (1, 3)
        model.set_input_size(img_size=(96, 128))
        assert same_weights(loaded, model)

    def test_load_weights_fills_a_given_model(self, model: nn.Module, weights: Path) -> None:
        other = timm.create_model("test_vit", num_classes=3)
        loading.load_weights(other, weights)
        assert same_weights(other, model)


class TestLoadingRefuses:
    def test_an_unknown_model(self) -> None:
        with pytest.raises(MctfError, match="timm has no model 'deit_tiny_patch16_225': did you mean"):
            loading.load_model("deit_tiny_patch16_225")

    def test_weights_of_another_model_and_leaves_the_model_alone(self, weights: Path) -> None:
        other = timm.create_model("test_vit2", num_classes=3)
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(MctfError, match=r"tiny\.safetensors holds weights of another model: it "):
            loading.load_weights(other, weights)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda state: state.pop("cls_token"), "it lacks cls_token"),
            (lambda state: state.update(extra=torch.zeros(1)), "it has an unexpected extra"),
            (lambda state: state.update(pos_embed=torch.zeros(1, 5, 64)), r"pos_embed is \(1, 5, 64\), not \(1, 101"),
        ],
    )
    def test_says_what_differs(self, model: nn.Module, tmp_path: Path, change: object, message: str) -> None:
        state = dict(model.state_dict())
        change(state)  # type: ignore[operator]
        torch.save(state, tmp_path / "other.pt")
        with pytest.raises(MctfError, match=message):
            loading.load_model("test_vit", weights=tmp_path / "other.pt")

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(MctfError, match="there is no weights file"):
            loading.load_model("test_vit", weights=tmp_path / "nowhere.pt")

    @pytest.mark.parametrize("name", ["bad.safetensors", "bad.pt"])
    def test_a_damaged_file(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b"not weights at all")
        with pytest.raises(MctfError, match=rf"{name} cannot be read as weights \(.+\): fetch it again"):
            loading.load_model("test_vit", weights=tmp_path / name)

    def test_a_file_that_holds_something_else(self, tmp_path: Path) -> None:
        torch.save([torch.zeros(1)], tmp_path / "list.pt")
        with pytest.raises(MctfError, match="holds no state_dict: expected tensors by name"):
            loading.load_model("test_vit", weights=tmp_path / "list.pt")

    def test_an_image_size_for_a_model_that_has_none(self, tmp_path: Path) -> None:
        torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "resnet.pt")
        with pytest.raises(MctfError, match="test_resnet has no image size to set: omit --image-size"):
            loading.load_model("test_resnet", weights=tmp_path / "resnet.pt", image_size=(96, 96))


def test_a_name_like_no_other_is_not_answered_with_two_thousand() -> None:
    with pytest.raises(MctfError, match=r"'qqqqq': it is like none of the \d{4} that are known, look it up$"):
        loading.create("qqqqq")
