"""Models of transformers on disk: a fused one is not saved as if it were plain, and one taken back is."""

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


def refuses(model: Any, place: Path) -> bool:
    """Whether saving the model is refused before anything is written."""
    with pytest.raises(mctf.MctfError, match=r"lose the fusion.*mctf\.unfuse"):
        model.save_pretrained(place)
    return not place.exists()


@every_model
def test_a_fused_model_is_not_saved_as_a_plain_one(name: str, tmp_path: Path) -> None:
    model = mctf.fuse(make(name), r=8)
    assert refuses(model, tmp_path / "model")
    with pytest.raises(mctf.MctfError, match="lose the fusion"):
        model.push_to_hub("nobody/nothing")
    with pytest.raises(mctf.MctfError, match="lose the fusion"):
        model.save_pretrained(tmp_path / "model", state_dict=model.state_dict())  # as trainers do


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_nor_is_its_copy(duplicate: Any, tmp_path: Path) -> None:
    model = mctf.fuse(make("hf_dinov2"), r=8)
    twin = duplicate(model)
    assert refuses(twin, tmp_path / "twin")
    mctf.unfuse(twin).save_pretrained(tmp_path / "twin")
    assert refuses(model, tmp_path / "model")


def test_nor_is_a_tower_inside_it_or_a_model_around_it(tmp_path: Path) -> None:
    model = mctf.fuse(two_towers("CLIP"), r=8)
    assert refuses(model.vision_model, tmp_path / "inside")
    model.text_model.save_pretrained(tmp_path / "beside")
    mctf.unfuse(model)
    mctf.fuse(model.vision_model, r=8)
    with pytest.raises(mctf.MctfError, match="lose the fusion"):
        model.save_pretrained(tmp_path / "around")
    assert not list((tmp_path / "around").glob("*.safetensors"))
    mctf.unfuse(model).save_pretrained(tmp_path / "around")


def test_its_state_dict_can_be_saved_by_anybody() -> None:
    model, plain = mctf.fuse(make("hf_vit"), r=8), make("hf_vit", seed=1)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters(), strict=True))


@every_model
@torch.no_grad()
def test_a_model_taken_back_comes_back_from_disk(name: str, tmp_path: Path) -> None:
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
    """What every module holds; hooks are kept in dictionaries of a module."""
    modules = model.named_modules()
    return {path: {key: copy.copy(value) for key, value in vars(module).items()} for path, module in modules}


def test_nothing_is_left_behind_on_a_model_taken_back() -> None:
    model = make("hf_beit")
    before = attributes(model)
    mctf.fuse(model, r=8)
    assert attributes(model) != before
    assert attributes(mctf.unfuse(model)) == before
