"""Fine-tuning of learned methods: their layers are trained, averaged, saved, resumed and evaluated."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers.command_line import Command
from helpers.models import make, make_images
from helpers.torchrun import run_together, write_stripes
from helpers.train_feeds import (
    ALONE,
    KilledError,
    Stripes,
    finish,
    killing_at,
    make_recipe,
    make_trainer,
    read_log,
    same,
    weights_of,
)
from mctf.api import find_stack
from mctf.data import Batch
from mctf.evaluation.evaluate import Setting, evaluate
from mctf.methods._layers import UntrainedWarning, stashed_layers
from mctf.train.build import build_around
from mctf.train.engine import Trainer
from mctf.train.finalize import final_model, write_weights
from mctf.train.teachers import OriginalModel
from mctf.train.two_branch import run_branch

METHODS = ["dynamic_vit", pytest.param("spvit", marks=pytest.mark.slow)]
every_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(autouse=True)
def _no_warning_of_untrained_layers() -> Any:
    with warnings.catch_warnings(action="error", category=UntrainedWarning):
        yield


@every_method
class TestEngine:
    def test_trains_and_averages_the_layers(self, tmp_path: Path, method: str) -> None:
        trainer = make_trainer(tmp_path, method=method, r=0.4, ema=0.5)
        before = weights_of(trainer)
        finish(trainer)
        after, average = weights_of(trainer), trainer.ema.module.state_dict()
        layers = [name for name in before if name.startswith("token_reduction.")]
        assert {name.split(".")[1] for name in layers} == {"1", "2", "3"}
        assert all(not torch.equal(before[name], after[name]) for name in layers)
        assert average.keys() == after.keys()
        assert all(not torch.equal(before[name], average[name]) for name in layers)

    def test_layers_have_a_learning_rate_of_their_own(self, tmp_path: Path, method: str) -> None:
        trainer = make_trainer(tmp_path, method=method, r=0.4, lr=1e-4, layers_lr=2e-2, warmup_epochs=0)
        assert trainer.schedule.set(0) == pytest.approx(1e-4)  # the logged rate is that of the model
        groups = trainer.optimizer.param_groups
        own = {id(parameter) for parameter in trainer.model.token_reduction.parameters()}
        for group in groups:
            inside = {id(parameter) in own for parameter in group["params"]}
            assert len(inside) == 1
            assert group["lr"] == pytest.approx(2e-2 if inside == {True} else 1e-4)
        counted = sum(len(group["params"]) for group in groups)
        assert counted == len(list(trainer.model.parameters()))
        assert {group["weight_decay"] for group in groups if id(group["params"][0]) in own} == {0, 0.05}

    def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(self, tmp_path: Path, method: str) -> None:
        options = {"method": method, "r": 0.4, "ema": 0.9, "features": {"drop_path_rate": 0.1}}
        torch.manual_seed(0)
        expected = finish(make_trainer(tmp_path / "whole", **options))
        torch.manual_seed(0)
        stopped = make_trainer(tmp_path / "stopped", save_steps=4, **options)
        with pytest.raises(KilledError):
            finish(stopped, on_step=killing_at(6))
        torch.manual_seed(0)
        resumed = make_trainer(tmp_path / "stopped", save_steps=4, **options)
        resumed.resume()
        assert resumed.step == 4
        assert same(finish(resumed), expected)

    def test_weights_and_layers_are_the_result(self, tmp_path: Path, method: str) -> None:
        trainer = make_trainer(tmp_path, method=method, r=0.4, ema=0.5)
        finish(trainer)
        expected = {name: value.clone() for name, value in trainer.ema.module.state_dict().items()}
        assert same(load_file(write_weights(trainer)), expected)
        model = final_model(trainer)
        assert find_stack(model) is None
        assert stashed_layers(model).keys() == {name for name in expected if name.startswith("token_reduction.")}
        assert same(load_file(write_weights(trainer)), expected)  # the unfused model has them stashed
        batch = Batch(make_images(model, 4), torch.arange(4))
        assert evaluate(model, [batch], [Setting(method, 0.4)]).notes == ()

    def test_trains_in_mixed_precision(self, tmp_path: Path, method: str) -> None:
        trainer = make_trainer(tmp_path, method=method, r=0.4, dtype="bfloat16", epochs=1, accumulate=2)
        assert all(value.isfinite().all() for value in finish(trainer).values())
        assert trainer.step == 1

    def test_the_loss_of_the_method_is_added(self, tmp_path: Path, method: str) -> None:
        trainer = make_trainer(tmp_path, method=method, r=0.4)
        images, labels = Stripes().make(0, 0)
        trainer.model.train()
        losses = trainer.objective(images, labels, None, None)
        assert losses.extra > 0
        torch.testing.assert_close(losses.total, losses.cross_entropy + losses.extra)


def test_evo_vit_trains_with_consistency(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, method="evo_vit", r=0.5, epochs=1)
    assert trainer.objective.consistency is not None
    assert all(value.isfinite().all() for value in finish(trainer).values())


class TestOriginal:
    def test_is_the_model_before_training(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, method="dynamic_vit", r=0.4)
        plain = make("plain", num_classes=4)
        images, _ = Stripes().make(0, 0)
        finish(trainer)
        outputs = trainer.objective.original(images)
        with torch.no_grad():
            torch.testing.assert_close(outputs.logits, plain(images))
            torch.testing.assert_close(outputs.tokens, plain.forward_features(images))
        assert not any(name.startswith("original") for name in trainer.objective.state_dict())

    def test_has_no_logits_for_other_classes(self) -> None:
        images, _ = Stripes().make(0, 0)
        assert OriginalModel(make("plain"), same_classes=False)(images).logits is None

    @pytest.mark.parametrize("same_classes", [True, False])
    def test_with_a_new_classifier_its_tokens_are_the_only_target(self, tmp_path: Path, same_classes: bool) -> None:
        recipe = make_recipe(tmp_path, method="dynamic_vit", r=0.4)
        trainer = build_around(make("plain", num_classes=4), Stripes(), recipe, ALONE, same_classes=same_classes)
        assert trainer.objective.original.same_classes is same_classes

    @pytest.mark.parametrize("options", [{"method": "dynamic_vit", "random_weights": True}, {"method": "mctf"}])
    def test_is_absent_where_nothing_can_be_learned_from_it(self, tmp_path: Path, options: dict[str, Any]) -> None:
        trainer = make_trainer(tmp_path, r=0.4, **options)
        assert trainer.objective.original is None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("learned")
    write_stripes(place / "train", images=8, seed=0)
    write_stripes(place / "val", images=2, seed=1)
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=4).state_dict(), place / "base.safetensors")
    return place


def arguments(place: Path, output: Path, method: str, *more: object) -> list[object]:
    tiny = ["test_vit", "--image-size", 64, "--weights", place / "base.safetensors", "-m", method, "--device", "cpu"]
    short = ["--epochs", 1, "--batch", 8, "--data", place / "train", "--output", output, "--log-steps", 1]
    return [*tiny, *short, "--augmentation", "none", "--no-progress", *more]


@every_method
def test_eval_reproduces_the_evaluation_of_finetune(
    place: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    run = Command(monkeypatch, capfd)
    done = run("finetune", *arguments(place, output, method, "--validation", place / "val"))
    assert done.code == 0, done.err
    assert "cross-entropy: 1 epoch of 4 steps" in done.out
    assert "untrained" not in done.out + done.err
    ours = json.loads((output / "evaluation.json").read_text())
    r = ours["rows"][-1]["r"]
    evaluate_options = ["--image-size", 64, "--data", place / "val", "--batch-size", 8, "--json", "-r", f"0,{r}"]
    again = run("eval", "test_vit", "--weights", output / "model.safetensors", "-m", method, *evaluate_options)
    assert (again.code, again.err) == (0, "")
    for one, other in zip(ours["rows"], json.loads(again.out)["rows"], strict=True):
        assert [one[key] for key in ("method", "r", "top1", "gflops")] == [
            other[key] for key in ("method", "r", "top1", "gflops")
        ]
        assert one["kl"] == pytest.approx(other["kl"], abs=1e-6)


@pytest.mark.nightly
@pytest.mark.slow
def test_layers_train_in_two_processes(place: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run_together(["finetune", *arguments(place, output, "spvit", "--batch", 4)], world=2, folder=tmp_path)
    layers = [value for name, value in load_file(output / "model.safetensors").items() if "token_reduction" in name]
    assert layers
    assert all(value.isfinite().all() for value in layers)
    assert all(row["extra"] > 0 for row in read_log(output))


@pytest.fixture(scope="module")
def expert() -> nn.Module:
    """A tiny model trained on the stripes."""
    model = make("plain", num_classes=4)
    recipe = make_recipe(Path("nowhere"), method="none", objective="cross-entropy", epochs=1)
    finish_unsaved(build_around(model, Stripes(batch=16, steps=60), recipe, ALONE))
    return model.eval()


def finish_unsaved(trainer: Trainer) -> None:
    trainer.save = lambda: None  # type: ignore[method-assign]
    finish(trainer)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("method", ["dynamic_vit", "spvit"])
def test_training_reaches_the_planned_keep_ratios(expert: nn.Module, tmp_path: Path, method: str) -> None:
    # the tokens of so small a model change so much with every patch that their term would outweigh all others
    options = {"ratio_weight": 200, "token_weight": 0}
    recipe = make_recipe(
        tmp_path, method=method, r=0.2, epochs=1, lr=1e-5, min_lr=1e-6, layers_lr=5e-3, method_options=options
    )
    torch.manual_seed(1)
    trainer = build_around(copy.deepcopy(expert), Stripes(batch=16, steps=160, seed=3), recipe, ALONE)
    images, labels = Stripes(batch=256, steps=1, seed=9).make(0, 0)
    assert max(misses(trainer.model, images)) > 0.1
    finish_unsaved(trainer)
    assert max(misses(trainer.model, images)) < 0.03
    with torch.no_grad():
        predictions = trainer.model.eval()(images).argmax(dim=1)
    assert (predictions == labels).float().mean() > 0.9


def misses(model: nn.Module, images: Tensor) -> list[float]:
    """Distance of the keep ratio of each stage from its target."""
    torch.manual_seed(0)
    decisions = run_branch(model.train(), images).method_states[-1]
    return [
        abs(float(kept.detach().mean()) - target)
        for kept, target in zip(decisions.kept, decisions.targets, strict=True)
    ]
