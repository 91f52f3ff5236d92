"""Models of transformers on disk: a fused model refuses to be saved, an unfused one is saved as before."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mctf
from helpers.families.hf import Hf, two_towers
from helpers.models import make, make_images, names_of, run

pytest.importorskip("transformers", reason="the extra hf is not installed")

every_model = pytest.mark.parametrize("name", names_of(lambda family: isinstance(family, Hf)))


def refuses(model: Any, folder: Path) -> bool:
    """Whether saving the model is refused before anything is written."""
    with pytest.raises(mctf.MctfError, match=r"lose the fusion.*mctf\.unfuse"):
        model.save_pretrained(folder)
    return not folder.exists()


@every_model
def test_a_fused_model_refuses_to_be_saved(name: str, tmp_path: Path) -> None:
    model = mctf.fuse(make(name), r=8)
    assert refuses(model, tmp_path / "model")
    with pytest.raises(mctf.MctfError, match="lose the fusion"):
        model.push_to_hub("user/model")
    with pytest.raises(mctf.MctfError, match="lose the fusion"):
        model.save_pretrained(tmp_path / "model", state_dict=model.state_dict())  # as trainers do


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_refuses_as_well(duplicate: Any, tmp_path: Path) -> None:
    model = mctf.fuse(make("hf_dinov2"), r=8)
    twin = duplicate(model)
    assert refuses(twin, tmp_path / "twin")
    mctf.unfuse(twin).save_pretrained(tmp_path / "twin")
    assert refuses(model, tmp_path / "model")


def test_the_fused_tower_inside_a_model_refuses_and_the_text_tower_does_not(tmp_path: Path) -> None:
    model = mctf.fuse(two_towers("CLIP"), r=8)
    assert refuses(model.vision_model, tmp_path / "vision")
    model.text_model.save_pretrained(tmp_path / "text")
    assert list((tmp_path / "text").glob("*.safetensors"))


@torch.no_grad()
def test_a_model_around_a_fused_tower_is_saved_without_the_fusion(tmp_path: Path) -> None:
    model = two_towers("CLIP")
    images = torch.randn(1, 3, 64, 64)
    baseline = model.vision_model(images).pooler_output
    mctf.fuse(model.vision_model, r=8)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded.vision_model(images).pooler_output, baseline)


def test_the_state_dict_of_a_fused_model_can_be_saved() -> None:
    model, plain = mctf.fuse(make("hf_vit"), r=8), make("hf_vit", seed=1)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters(), strict=True))


@every_model
@torch.no_grad()
def test_an_unfused_model_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = make(name)
    images = make_images(model, 2)
    plain = run(model, images)
    mctf.fuse(model, r=8)
    fused = run(model, images)
    mctf.unfuse(model).save_pretrained(tmp_path)
    again = (
        type(model).from_pretrained(tmp_path, attn_implementation=Hf.tower(model).config._attn_implementation).eval()
    )
    if hasattr(Hf.tower(again).embeddings, "mask_token"):
        Hf.tower(again).embeddings.mask_token = None  # as in the model that was saved
    assert again.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(run(again, images), plain)
    mctf.fuse(again, r=8)
    assert torch.equal(run(again, images), fused)


def attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of every module, which include its hooks."""
    modules = model.named_modules()
    return {path: {key: copy.copy(value) for key, value in vars(module).items()} for path, module in modules}


def test_unfusing_restores_every_attribute() -> None:
    model = make("hf_beit")
    before = attributes(model)
    mctf.fuse(model, r=8)
    assert attributes(model) != before
    assert attributes(mctf.unfuse(model)) == before
