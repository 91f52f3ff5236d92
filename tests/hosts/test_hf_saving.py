"""Models of transformers on disk: a fused model is saved with its fusion, an unfused one as before."""

import copy
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mctf
from helpers.families.hf import Hf, two_towers
from helpers.learned import teach
from helpers.models import make, make_images, names_of, run
from mctf.api import find_stack
from mctf.models.loading import load_model

pytest.importorskip("transformers", reason="the extra hf is not installed")

every_model = pytest.mark.parametrize("name", names_of(lambda family: isinstance(family, Hf)))


def again(folder: Path, like: Any) -> Any:
    """`mctf.load` of a folder, with the attention of a model, and without the mask token that it has removed."""
    loaded: Any = mctf.load(folder, attn_implementation=Hf.tower(like).config._attn_implementation)
    if getattr(Hf.tower(like).embeddings, "mask_token", 0) is None:
        Hf.tower(loaded).embeddings.mask_token = None
    return loaded


@every_model
@torch.no_grad()
def test_a_fused_model_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = mctf.fuse(make(name), "mctf", r=8, blocks=(1, 3), tau_info=0.1)
    images = make_images(model, 2)
    before = copy.deepcopy(model.config)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mctf"]["r"] == 8
    assert not hasattr(model.config, "mctf")
    assert not hasattr(before, "mctf")
    loaded = again(tmp_path, model)
    assert type(loaded) is type(model)
    assert torch.equal(run(loaded, images), run(model, images))
    assert repr(find_stack(loaded)) == repr(find_stack(model))
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert not hasattr(loaded.config, "mctf")


@every_model
@torch.no_grad()
def test_a_reader_without_mctf_gets_the_unfused_model(name: str, tmp_path: Path) -> None:
    model = make(name)
    images = make_images(model, 2)
    mctf.fuse(model, r=8).save_pretrained(tmp_path, state_dict=model.state_dict())  # as trainers do
    attention = Hf.tower(model).config._attn_implementation
    plain = type(model).from_pretrained(tmp_path, attn_implementation=attention).eval()
    if getattr(Hf.tower(model).embeddings, "mask_token", 0) is None:
        Hf.tower(plain).embeddings.mask_token = None
    fused = run(model, images)
    assert torch.equal(run(plain, images), run(mctf.unfuse(model), images))
    assert mctf.load(plain) is plain
    assert torch.equal(run(plain, images), fused)
    mctf.unfuse(plain).save_pretrained(tmp_path / "unfused")
    assert "mctf" not in json.loads((tmp_path / "unfused" / "config.json").read_text())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_a_copy_is_saved_with_its_own_fusion(duplicate: Any, tmp_path: Path) -> None:
    model = mctf.fuse(make("hf_dinov2"), r=8)
    twin = duplicate(model)
    mctf.set_r(twin, 4)
    for each, folder, r in ((twin, "twin", 4), (model, "model", 8)):
        each.save_pretrained(tmp_path / folder)
        assert mctf.load(tmp_path / folder).get_submodule(container_name(model)).r == r
    mctf.unfuse(twin).save_pretrained(tmp_path / "unfused")
    with pytest.raises(mctf.MctfError, match=r"config\.json holds no fusion: load the model with its own library"):
        mctf.load(tmp_path / "unfused")


def container_name(model: nn.Module) -> str:
    stack = find_stack(model)
    return next(name for name, module in model.named_modules() if module is stack)


@torch.no_grad()
def test_two_towers_and_the_fused_tower_inside(tmp_path: Path) -> None:
    model = mctf.fuse(two_towers("CLIP"), "tome", r=8)
    images = torch.randn(1, 3, 64, 64)
    fused = model.vision_model(images).pooler_output
    for part, folder in ((model, "whole"), (model.vision_model, "vision")):
        part.save_pretrained(tmp_path / folder)
        loaded: Any = mctf.load(tmp_path / folder)
        assert type(loaded) is type(part)
        tower = getattr(loaded, "vision_model", loaded)
        assert torch.equal(tower(images).pooler_output, fused)
    model.text_model.save_pretrained(tmp_path / "text")
    assert list((tmp_path / "text").glob("*.safetensors"))


@torch.no_grad()
def test_learned_layers_are_saved_and_loaded(tmp_path: Path) -> None:
    model = make("hf_vit")
    teach(model, "dynamic_vit", [0, 0.3, 0, 0.3])
    mctf.fuse(model, "dynamic_vit", r=[0, 0.3, 0, 0.3])
    mctf.set_r(model, [0, 0, 0, 0.3])  # the layers of block 1 stay
    images = make_images(model, 2)
    model.save_pretrained(tmp_path)
    loaded: Any = mctf.load(tmp_path)
    assert torch.equal(run(loaded, images), run(model, images))
    mctf.set_r(loaded, [0, 0.3, 0, 0.3])
    mctf.set_r(model, [0, 0.3, 0, 0.3])
    assert torch.equal(run(loaded, images), run(model, images))
    with pytest.raises(mctf.MctfError, match=r"the layers of dynamic_vit belong to the model that was fused"):
        model.vit.save_pretrained(tmp_path / "inner")
    plain = type(model).from_pretrained(tmp_path)
    with pytest.raises(mctf.MctfError, match=r"the weights lack the layers of dynamic_vit: give mctf\.load\(folder\)"):
        mctf.load(plain)
    assert find_stack(plain) is None
    named = mctf.fuse(load_model(f"hf:{tmp_path}"), "dynamic_vit", r=[0, 0, 0, 0.3])  # as commands load it
    mctf.set_r(model, [0, 0, 0, 0.3])
    assert torch.equal(named(images), run(model, images))


def test_saving_by_name(tmp_path: Path) -> None:
    model = two_towers("CLIP")
    mctf.fuse(model.vision_model, r=8)
    with pytest.raises(mctf.MctfError, match=r"only vision_model is fused.*or save model\.vision_model"):
        mctf.save(model, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    mctf.save(model.vision_model, tmp_path / "vision")
    assert find_stack(mctf.load(tmp_path / "vision")) is not None
    with pytest.raises(mctf.MctfError, match="is saved into one"):
        mctf.save(model.vision_model, tmp_path / "model.safetensors")


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
