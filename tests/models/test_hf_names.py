"""Models of transformers by name, in the commands and in Python, and the error where transformers is not installed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

import mctf
from helpers.command_line import Command
from helpers.families.hf import Hf, build, two_towers
from helpers.images import write_folder
from helpers.models import make, make_images, names_of, run
from mctf.data import Preprocessing
from mctf.models.hf_images import read_preprocessing
from mctf.models.loading import create, load_model

CENTER = {
    "size": {"shortest_edge": 72},
    "do_center_crop": True,
    "crop_size": {"height": 64, "width": 64},
    "resample": 2,
    "image_mean": [0.1, 0.2, 0.3],
    "image_std": [0.4, 0.5, 0.6],
}
needs_transformers = pytest.mark.skipif(
    not names_of(lambda family: isinstance(family, Hf)), reason="the extra hf is not installed"
)


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved models of several kinds, one with its preprocessing, and a folder of pictures."""
    saved_models = tmp_path_factory.mktemp("hf")
    for name in ("hf_dinov2", "hf_deit", "hf_dinov3", "hf_mae"):
        make(name).save_pretrained(saved_models / name)
    two_towers("CLIP").save_pretrained(saved_models / "clip")
    (saved_models / "hf_dinov2" / "preprocessor_config.json").write_text(json.dumps(CENTER))
    (saved_models / "clip" / "processor_config.json").write_text(
        json.dumps({"image_processor": {"size": {"height": 64, "width": 64}}})
    )
    write_folder(saved_models / "pictures", "cat/0.png", "cat/1.png", "dog/0.png")
    return saved_models


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


@needs_transformers
class TestLoading:
    @pytest.mark.parametrize("name", ["hf_dinov2", "hf_deit"])
    @torch.no_grad()
    def test_a_classifier_gives_logits(self, saved_models: Path, name: str) -> None:
        loaded: Any = load_model(f"hf:{saved_models / name}")
        model = make(name)
        images = make_images(model, 2)
        assert loaded.num_classes == 10
        assert torch.equal(loaded(images), run(model, images))
        mctf.fuse(loaded, r=8)
        mctf.fuse(model, r=8)
        assert torch.equal(loaded(images), run(model, images))

    @torch.no_grad()
    def test_pre_logits_are_the_input_of_the_classifier(self, saved_models: Path) -> None:
        model: Any = load_model(f"hf:{saved_models / 'hf_dinov2'}")
        images = torch.randn(2, 3, 64, 64)
        features = model.forward_features(images)
        assert torch.equal(model.forward_head(features), model(images))
        pooled = model.forward_head(features, pre_logits=True)
        assert torch.equal(model.model.classifier(pooled), model(images))
        assert not model.model.classifier._forward_pre_hooks

    @pytest.mark.parametrize("name", ["hf_dinov3", "hf_mae", "clip"])
    @torch.no_grad()
    def test_other_models_give_pooled_features(self, saved_models: Path, name: str) -> None:
        model: Any = load_model(f"hf:{saved_models / name}")
        images = torch.randn(2, 3, 64, 64)
        assert model.num_classes == 0
        assert model(images).shape == (2, 48)
        assert torch.equal(model(images), model(images))  # ViTMAE shuffles and hides nothing here
        mctf.fuse(model, r=8)
        with mctf.trace(model) as trace:
            model(images)
        assert trace.token_counts == mctf.plan(f"hf:{saved_models / name}", r=8).token_counts
        assert trace.source_map().shape[1] > 64

    @torch.no_grad()
    def test_a_pooler_without_weights_is_not_used(self, tmp_path: Path) -> None:
        model = build("ViTModel", "ViTConfig", intermediate_size=96).eval()
        model.pooler = None
        model.save_pretrained(tmp_path)
        images = torch.randn(2, 3, 64, 64)
        assert torch.equal(load_model(f"hf:{tmp_path}")(images), model(images).last_hidden_state[:, 0])

    @torch.no_grad()
    def test_positions_are_resampled_for_another_image_size(self, saved_models: Path) -> None:
        model: Any = load_model(f"hf:{saved_models / 'hf_deit'}", image_size=(80, 64))
        images = torch.randn(1, 3, 80, 64)
        assert torch.equal(model(images), model.model(images, interpolate_pos_encoding=True).logits)
        assert Preprocessing.of(model).image_size == (80, 64)

    def test_the_image_size_is_that_of_the_preprocessing(self, saved_models: Path, tmp_path: Path) -> None:
        make("hf_dinov2").save_pretrained(tmp_path)
        smaller = CENTER | {"crop_size": {"height": 48, "width": 40}}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(smaller))
        assert Preprocessing.of(load_model(f"hf:{tmp_path}")).image_size == (48, 40)
        assert mctf.plan(f"hf:{tmp_path}", r=0).image_tokens == 1 + 6 * 5
        assert mctf.plan(f"hf:{tmp_path}", r=0, image_size=64).image_tokens == 65

    def test_random_weights_are_not_those_of_the_directory(self, saved_models: Path) -> None:
        random, saved = create(f"hf:{saved_models / 'hf_deit'}"), load_model(f"hf:{saved_models / 'hf_deit'}")
        assert not torch.equal(next(random.parameters()), next(saved.parameters()))
        assert random.state_dict().keys() == saved.state_dict().keys()

    def test_options_go_into_the_config(self, saved_models: Path) -> None:
        model: Any = load_model(f"hf:{saved_models / 'hf_dinov2'}", drop_path_rate=0.25)
        assert model.model.config.drop_path_rate == 0.25
        with pytest.raises(mctf.MctfError, match="cannot be created with mlp_layer"):
            load_model(f"hf:{saved_models / 'hf_dinov2'}", mlp_layer=None)

    def test_a_directory_without_all_weights_is_refused(self, saved_models: Path, tmp_path: Path) -> None:
        model = make("hf_deit")
        config = json.loads((saved_models / "hf_deit" / "config.json").read_text())
        model.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
        with pytest.raises(mctf.MctfError, match="lacks weights of a DeiTForImageClassificationWithTeacher"):
            load_model(f"hf:{tmp_path}")


@needs_transformers
class TestCommands:
    def test_plan(self, saved_models: Path, command: Command) -> None:
        answer = command("plan", f"hf:{saved_models / 'hf_dinov2'}", "-r", 8, "--json")
        assert answer.err == ""
        assert json.loads(answer.out)["token_counts"] == [65, 57, 49, 41]

    def test_eval(self, saved_models: Path, command: Command) -> None:
        answer = command(
            "eval", f"hf:{saved_models / 'hf_dinov2'}", "--data", saved_models / "pictures", "-r", "0,8", "--json"
        )
        assert answer.err == ""
        read = json.loads(answer.out)
        assert read["preprocessing"]["mean"] == [0.1, 0.2, 0.3]
        assert read["preprocessing"]["crop_pct"] == pytest.approx(64 / 72)
        plain, fused = read["rows"]
        assert plain["agreement"] == 100
        assert fused["kl"] > 0
        assert 0.5 < fused["class_cosine"] < 1

    def test_bench(self, saved_models: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mctf.evaluation.benchmark._repeats", lambda *_: 1)
        name = f"hf:{saved_models / 'clip'}"
        answer = command("bench", name, "-r", 8, "--batch", 2, "--rounds", 1, "--method", "mctf", "--json")
        assert answer.code == 0, answer.err
        rows = json.loads(answer.out)["tables"][0]["rows"]
        assert {"baseline", "mctf"} <= {row["name"] for row in rows}

    def test_mistakes_are_explained(self, saved_models: Path, command: Command, tmp_path: Path) -> None:
        assert "no directory" in command.refusal("plan", f"hf:{tmp_path / 'nowhere'}")
        (tmp_path / "config.json").write_text("{}")
        assert "cannot be loaded" in command.refusal("plan", f"hf:{tmp_path}")
        weights = saved_models / "hf_deit" / "model.safetensors"
        with pytest.raises(mctf.MctfError, match="includes its weights"):
            load_model(f"hf:{saved_models / 'hf_deit'}", weights=weights)

    def test_a_hub_out_of_reach(self, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "facebook/nothing is not in the cache" in command.refusal("plan", "hf:facebook/nothing")


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    assert "pip install 'mctf[hf]'" in command.refusal("plan", "hf:facebook/dinov2-base")


class TestPreprocessing:
    def test_a_center_crop(self) -> None:
        assert read_preprocessing(CENTER) == {
            "input_size": (3, 64, 64),
            "crop_pct": 64 / 72,
            "interpolation": "bilinear",
            "mean": (0.1, 0.2, 0.3),
            "std": (0.4, 0.5, 0.6),
        }

    def test_images_squashed_to_a_size(self) -> None:
        read = read_preprocessing({"size": {"height": 96, "width": 64}, "resample": 3})
        assert read == {"input_size": (3, 96, 64), "crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bicubic"}

    def test_a_size_in_one_number(self) -> None:
        assert read_preprocessing({"size": 64})["input_size"] == (3, 64, 64)

    def test_pixels_on_another_scale(self) -> None:
        """(x * factor - mean) / std of pixels up to 255 is what timm's mean and std must express for those up to 1."""
        given = {"rescale_factor": 2 / 255, "image_mean": [1.0] * 3, "image_std": [0.5] * 3}
        assert read_preprocessing(given) == {"mean": (0.5,) * 3, "std": (0.25,) * 3}

    def test_pixels_without_normalization(self) -> None:
        assert read_preprocessing({"do_normalize": False}) == {"mean": (0.0,) * 3, "std": (1.0,) * 3}
        assert read_preprocessing({}) == {}

    def test_an_unsupported_size(self) -> None:
        with pytest.raises(mctf.MctfError, match="longest_edge"):
            read_preprocessing({"size": {"longest_edge": 64}})
