"""T2T-ViT and LV-ViT by name and from files: timm's registry, and checkpoints as their authors write them."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

import mctf
from mctf.models import loading


def run_python(code: str) -> str:
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


class TestRegistry:
    NAMES = "['lvvit_m', 'lvvit_s', 'lvvit_t', 't2t_vit_t_14', 't2t_vit_t_19']"
    ASK = "print(timm.list_models(['lvvit*', 't2t*']))"

    def test_mctf_before_timm(self) -> None:
        code = (
            "import sys, mctf; print({'timm', 'torch'} & set(sys.modules))\n"
            f"import timm, timm.models as models; {self.ASK}\n"
            "print(type(models.__loader__).__name__, models.__loader__ is models.__spec__.loader)"
        )
        assert run_python(code).splitlines() == ["set()", self.NAMES, "SourceFileLoader True"]

    def test_timm_before_mctf(self) -> None:
        assert run_python(f"import timm; {self.ASK}; import mctf; {self.ASK}").splitlines() == ["[]", self.NAMES]

    def test_a_model_file_before_timm(self) -> None:
        assert run_python(f"import mctf.models.lv_vit, timm; {self.ASK}") == self.NAMES

    def test_names_are_checked_like_timms_own(self) -> None:
        with pytest.raises(mctf.MctfError, match="timm has no model 't2t_vit_14': did you mean 't2t_vit_t_14'"):
            loading.create("t2t_vit_14")
        assert loading.create_empty("t2t_vit_t_19", image_size=(96, 128)).pos_embed.shape == (1, 49, 448)


def wrap(state: dict[str, Tensor], wrapper: str) -> Any:
    """A state_dict as trainers write it."""
    parallel = {f"module.{key}": value for key, value in state.items()}
    other = {key: torch.zeros_like(value) for key, value in state.items()}
    return {
        "plain": state,
        "model": {"model": state, "epoch": 299},
        "parallel": {"state_dict": parallel, "arch": "lvvit", "args": Namespace(lr=1e-3, opt="adamw")},
        "averaged": {"epoch": 3, "state_dict": other, "state_dict_ema": parallel},
        "averaged_alone": {"state_dict_ema": state},
        "twice": {"model": {"state_dict": state}},
    }[wrapper]


class TestLoading:
    @pytest.mark.parametrize("wrapper", ["plain", "model", "parallel", "averaged", "averaged_alone", "twice"])
    def test_checkpoints_load_without_renaming(self, tmp_path: Path, wrapper: str) -> None:
        state = timm.create_model("lvvit_t").state_dict()
        torch.save(wrap(state, wrapper), tmp_path / "lvvit.pth.tar")
        loaded = loading.load_model("lvvit_t", weights=tmp_path / "lvvit.pth.tar").state_dict()
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[key], value) for key, value in state.items())

    def test_a_safetensors_file_of_t2t_with_fewer_classes(self, tmp_path: Path) -> None:
        model = timm.create_model("t2t_vit_t_14", num_classes=5)
        save_file(model.state_dict(), tmp_path / "t2t.safetensors")
        loaded = loading.load_model("t2t_vit_t_14", weights=tmp_path / "t2t.safetensors", image_size=(96, 96))
        assert loaded(torch.ones(1, 3, 96, 96)).shape == (1, 5)

    def test_both_heads_take_the_classes_of_a_file_of_another_size(self, tmp_path: Path) -> None:
        model = timm.create_model("lvvit_t", num_classes=5, img_size=96).eval()
        torch.save(model.state_dict(), tmp_path / "small.pt")
        loaded = loading.load_model("lvvit_t", weights=tmp_path / "small.pt", image_size=(96, 96))
        x = torch.ones(1, 3, 96, 96)
        assert torch.equal(loaded(x), model(x))
        with pytest.raises(mctf.MctfError, match=r"pos_embed is \(1, 37, 240\), not \(1, 197, 240\)"):
            loading.load_model("lvvit_t", weights=tmp_path / "small.pt")

    def test_nothing_in_a_file_is_executed(self, tmp_path: Path) -> None:
        torch.save({"state_dict": {}, "args": Trap(tmp_path / "sprung")}, tmp_path / "trap.pth")
        with pytest.raises(mctf.MctfError, match="cannot be read as weights"):
            loading.load_model("lvvit_t", weights=tmp_path / "trap.pth")
        assert not (tmp_path / "sprung").exists()
        torch.load(tmp_path / "trap.pth", weights_only=False)
        assert (tmp_path / "sprung").exists()


class Trap:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)
