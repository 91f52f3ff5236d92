"""Learned layers of a method: created with a fused model, read from files, stashed until a model is fused."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import mctf
from helpers.command_line import Command
from helpers.images import write_folder
from helpers.learned import teach
from helpers.models import make, make_images
from mctf import MctfError
from mctf.data import Batch
from mctf.evaluation.evaluate import Setting, evaluate
from mctf.methods._layers import UntrainedWarning, full_state_dict, stashed_layers
from mctf.models import loading

METHOD = "dynamic_vit"
R = 0.4


@pytest.fixture
def quiet() -> Any:
    """Fails a test in which a learned method complains of untrained layers."""
    with warnings.catch_warnings(action="error", category=UntrainedWarning):
        yield


@pytest.fixture
def trained() -> nn.Module:
    """A tiny timm model, fused, with layers whose values matter."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=3).eval()
    teach(model, METHOD, R)
    return mctf.fuse(model, METHOD, r=R)


@pytest.fixture
def weights(trained: nn.Module, tmp_path: Path) -> Path:
    """Its weights, as fine-tuning writes them."""
    save_file(trained.state_dict(), tmp_path / "trained.safetensors")
    return tmp_path / "trained.safetensors"


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))


class TestMaking:
    def test_says_that_layers_are_untrained(self) -> None:
        with pytest.warns(UntrainedWarning, match="the layers of dynamic_vit are untrained: load the weights"):
            mctf.fuse(make("plain"), METHOD)

    @pytest.mark.parametrize("method", ["mctf", "tome", "evo_vit"])
    @pytest.mark.usefixtures("quiet")
    def test_is_quiet_where_nothing_is_learned(self, method: str) -> None:
        assert not hasattr(mctf.fuse(make("plain"), method), "token_reduction")
        assert not hasattr(mctf.fuse(make("plain"), METHOD, r=0), "token_reduction")

    @pytest.mark.filterwarnings("ignore::mctf.methods._layers.UntrainedWarning")
    def test_follows_the_generator_and_leaves_it_alone(self) -> None:
        def made(seed: int) -> tuple[Tensor, Tensor]:
            model = make("plain")
            torch.manual_seed(seed)
            layers = mctf.fuse(model, METHOD).token_reduction
            return layers["1"].score[0].weight, torch.rand(1)

        (one, after), (again, _), (other, _) = made(1), made(1), made(2)
        assert torch.equal(one, again)
        assert not torch.equal(one, other)
        torch.manual_seed(1)
        assert torch.equal(torch.rand(1), after)

    @pytest.mark.filterwarnings("ignore::mctf.methods._layers.UntrainedWarning")
    def test_has_the_model_s_dtype_and_mode(self) -> None:
        model = mctf.fuse(make("plain").half().train(), METHOD)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
        assert model.token_reduction.training
        assert not mctf.fuse(make("plain"), METHOD).token_reduction.training


class TestFiles:
    @pytest.mark.usefixtures("quiet")
    @torch.no_grad()
    def test_layers_wait_for_the_model_to_be_fused(self, trained: nn.Module, weights: Path, images: Tensor) -> None:
        loaded = loading.load_model("test_vit", weights=weights)
        assert not any(key.startswith("token_reduction") for key in loaded.state_dict())
        assert torch.equal(loaded(images), copy.deepcopy(mctf.unfuse(copy.deepcopy(trained)))(images))
        twin = copy.deepcopy(loaded)
        for model in (loaded, twin):
            assert torch.equal(mctf.fuse(model, METHOD, r=R)(images), trained(images))
        assert full_state_dict(mctf.unfuse(loaded)).keys() == trained.state_dict().keys()

    @pytest.mark.filterwarnings("ignore::mctf.methods._layers.UntrainedWarning")
    @torch.no_grad()
    def test_a_fused_model_takes_them_at_once(self, trained: nn.Module, weights: Path, images: Tensor) -> None:
        by_torch, by_path = (
            mctf.fuse(timm.create_model("test_vit", num_classes=3).eval(), METHOD, r=R) for _ in range(2)
        )
        by_torch.load_state_dict(loading.read_state_dict(weights))
        loading.load_weights(by_path, weights)
        assert torch.equal(by_torch(images), trained(images))
        assert torch.equal(by_path(images), trained(images))
        assert not stashed_layers(by_path)

    @pytest.mark.usefixtures("quiet")
    def test_other_methods_do_without(self, weights: Path, images: Tensor) -> None:
        loaded = loading.load_model("test_vit", weights=weights)
        assert mctf.fuse(loaded, "mctf", r=8)(images).shape == (2, 3)

    @pytest.mark.parametrize(
        ("method", "options", "words"),
        [
            ("spvit", {}, r"of another method than spvit, or of other blocks \(they .* token_reduction\.\d\."),
            (METHOD, {"blocks": [1, 3]}, r"they lack token_reduction\.1\.read\.0\.weight\): fuse as they were trained"),
        ],
    )
    def test_layers_of_others_are_refused(
        self, weights: Path, images: Tensor, method: str, options: dict[str, Any], words: str
    ) -> None:
        loaded = loading.load_model("test_vit", weights=weights)
        before = loaded(images)
        with pytest.raises(MctfError, match=words):
            mctf.fuse(loaded, method, r=R, **options)
        assert torch.equal(loaded(images), before)
        mctf.fuse(loaded, METHOD, r=R)

    @pytest.mark.usefixtures("quiet")
    def test_fewer_blocks_take_their_part(self, weights: Path, images: Tensor) -> None:
        loaded = loading.load_model("test_vit", weights=weights)
        blocks = [int(name) for name in mctf.fuse(loaded, METHOD, r=R).token_reduction]
        mctf.fuse(mctf.unfuse(loaded), METHOD, r=R, blocks=blocks[1:])
        assert list(loaded.token_reduction) == [str(block) for block in blocks[1:]]


class TestEvaluation:
    def test_says_what_is_untrained(self) -> None:
        model = make("plain")
        batch = Batch(make_images(model, 4), torch.arange(4))
        settings = [Setting(METHOD, R), Setting(METHOD, 0), Setting("mctf", 8)]
        note = "the layers of dynamic_vit are untrained: fine-tune the model with it"
        assert evaluate(model, [batch], settings).notes == (note,)
        assert evaluate(model, [batch], settings[1:]).notes == ()
        teach(model, METHOD, R)
        assert evaluate(model, [batch], settings).notes == ()

    def test_takes_the_layers_that_are_kept_aside(self) -> None:
        model = make("plain")
        images = make_images(model, 4)
        teach(model, METHOD, R)
        found = evaluate(model, [Batch(images, None)], [Setting(METHOD, R)]).rows[1]
        with torch.no_grad():
            plain = model(images).log_softmax(dim=1)
            fused = mctf.fuse(model, METHOD, r=R)(images).log_softmax(dim=1)
        kl = (plain.exp() * (plain - fused)).sum(dim=1).mean()
        assert found.kl == pytest.approx(float(kl), rel=1e-4)

    def test_by_the_command_line(
        self, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        names = [f"{name}/{index}.png" for name in ("cat", "dog", "emu") for index in range(2)]
        data = write_folder(tmp_path / "pictures", *names)
        run = Command(monkeypatch, capfd, "eval", "test_vit", "--json", "--data", str(data), "-r", str(R))
        found = run("--weights", weights, "-m", METHOD)
        assert (found.code, found.err) == (0, "")
        answer = json.loads(found.out)
        assert not any("untrained" in note for note in answer["notes"])
        assert [row["method"] for row in answer["rows"]] == ["baseline", METHOD]
        line = run.refusal("--weights", weights, "-m", "spvit")
        assert "the weights hold layers of another method than spvit" in line
