"""Models by name and weights from files."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mctf import MctfError
from mctf.models import loading

SHALLOW = {"depth": 2}


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


def parallel(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{key}": value for key, value in state.items()}


def zeros(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: torch.zeros_like(value) for key, value in state.items()}


# a state_dict as trainers write it
WRAPPERS: dict[str, Any] = {
    "bare": lambda state: state,
    "prefixed": parallel,
    "model": lambda state: {"model": state, "epoch": 299},
    "arguments": lambda state: {"state_dict": parallel(state), "args": Namespace(lr=1e-3, opt="adamw")},
    "averaged": lambda state: {"epoch": 3, "state_dict": zeros(state), "state_dict_ema": parallel(state)},
    "averaged_alone": lambda state: {"state_dict_ema": state},
    "nested": lambda state: {"model": {"state_dict": state}},
}


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
        assert loading.classifier_rows(distilled.state_dict(), timm.create_model(name, **tiny)) == 3

    @pytest.mark.parametrize("wrapper", WRAPPERS)
    def test_wrapped_and_prefixed_files_are_read(self, model: nn.Module, tmp_path: Path, wrapper: str) -> None:
        torch.save(WRAPPERS[wrapper](model.state_dict()), tmp_path / "tiny.pth.tar")
        assert same_weights(loading.load_model("test_vit", weights=tmp_path / "tiny.pth.tar"), model)

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

    def test_a_t2t_file_with_fewer_classes(self, tmp_path: Path) -> None:
        save_file(
            timm.create_model("t2t_vit_t_14", num_classes=5, **SHALLOW).state_dict(), tmp_path / "t2t.safetensors"
        )
        loaded = loading.load_model(
            "t2t_vit_t_14", weights=tmp_path / "t2t.safetensors", image_size=(96, 96), **SHALLOW
        )
        assert loaded(torch.ones(1, 3, 96, 96)).shape == (1, 5)

    def test_both_heads_of_lv_vit_take_the_classes_of_a_file_of_another_size(self, tmp_path: Path) -> None:
        model = timm.create_model("lvvit_t", num_classes=5, img_size=96, **SHALLOW).eval()
        torch.save(model.state_dict(), tmp_path / "small.pt")
        loaded = loading.load_model("lvvit_t", weights=tmp_path / "small.pt", image_size=(96, 96), **SHALLOW)
        x = torch.ones(1, 3, 96, 96)
        assert torch.equal(loaded(x), model(x))
        with pytest.raises(MctfError, match=r"pos_embed is \(1, 37, 240\), not \(1, 197, 240\)"):
            loading.load_model("lvvit_t", weights=tmp_path / "small.pt", **SHALLOW)


class Trap:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class TestLoadingRefuses:
    def test_files_with_code_which_is_not_executed(self, tmp_path: Path) -> None:
        torch.save({"state_dict": {}, "args": Trap(tmp_path / "sprung")}, tmp_path / "trap.pth")
        with pytest.raises(
            MctfError, match="holds Python objects beside tensors, which are not loaded: save its state_dict"
        ):
            loading.load_model("test_vit", weights=tmp_path / "trap.pth")
        assert not (tmp_path / "sprung").exists()
        torch.load(tmp_path / "trap.pth", weights_only=False)
        assert (tmp_path / "sprung").exists()

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


def test_names_are_checked_like_timms_own() -> None:
    with pytest.raises(MctfError, match="timm has no model 't2t_vit_14': did you mean 't2t_vit_t_14'"):
        loading.create("t2t_vit_14")
    assert loading.create_empty("t2t_vit_t_19", image_size=(96, 128)).pos_embed.shape == (1, 49, 448)


def test_a_name_without_a_close_match_is_not_answered_with_two_thousand() -> None:
    with pytest.raises(MctfError, match=r"'qqqqq': .*\d,?\d{3}") as caught:
        loading.create("qqqqq")
    assert len(str(caught.value)) < 200


def test_copies_share_their_weights(model: nn.Module) -> None:
    twin = loading.copy_sharing_weights(model)
    assert twin is not model
    assert all(one is not other for one, other in zip(twin.modules(), model.modules(), strict=True))
    assert all(one is other for one, other in zip(twin.parameters(), model.parameters(), strict=True))
