"""Libraries that train models, on fused ones: transformers' Trainer, PEFT, accelerate, Lightning.

Each is imported inside its test: together they take longer to import than to run.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mctf
from helpers.models import CLASSES, make, make_images, run
from mctf.api import find_stack, fused_stack

LABELS = torch.arange(8) % CLASSES


def make_hf(**options: Any) -> Any:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    return make("hf_vit", **options)


def examples(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    return [
        {"pixel_values": image, "labels": label} for image, label in zip(make_images(model, 8), LABELS, strict=True)
    ]


def trainer(model: Any, folder: Path, **options: Any) -> Any:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    transformers = pytest.importorskip("transformers")
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 0,
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder), **settings | options)
    return transformers.Trainer(model, arguments, train_dataset=examples(model), eval_dataset=examples(model))


@pytest.mark.slow
def test_trainer_trains_evaluates_saves_and_resumes(tmp_path: Path) -> None:
    model = mctf.fuse(make_hf(), r=8)
    before = copy.deepcopy(model.state_dict())
    one = trainer(model, tmp_path, load_best_model_at_end=True)
    one.train()
    losses = [entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry]
    assert len(losses) == 2
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert one.predict(examples(model)).predictions.shape == (8, CLASSES)

    images = make_images(model, 2)
    last: Any = mctf.load(tmp_path / "checkpoint-4")
    assert fused_stack(last).schedule == fused_stack(model).schedule

    again = mctf.fuse(make_hf(seed=1), r=8)  # other weights: the checkpoint brings them
    two = trainer(again, tmp_path)
    two.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert two.state.global_step == 4
    with torch.no_grad():
        torch.testing.assert_close(run(again.eval(), images), run(last, images), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"bf16": True}, {"gradient_checkpointing": True}], ids=["bf16", "checkpointing"])
def test_trainer_with_its_options(options: dict[str, bool], tmp_path: Path) -> None:
    model = mctf.fuse(make_hf(), "tome", r=8)
    one = trainer(model, tmp_path, max_steps=1, eval_strategy="no", save_strategy="no", **options)
    assert torch.isfinite(torch.tensor(one.train().training_loss))


def lora(model: nn.Module, *targets: str) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False))


@pytest.mark.parametrize(
    ("name", "targets"), [("plain", ("qkv", "proj")), ("hf_vit", ("q_proj", "v_proj", "query", "value"))]
)
def test_lora_before_or_after_fusing(name: str, targets: tuple[str, ...]) -> None:
    if name == "hf_vit":
        pytest.importorskip("transformers", reason="the extra hf is not installed")
    first = mctf.fuse(make(name).double(), r=8)
    adapted_last = lora(first, *targets)
    second = make(name).double()
    adapted_first = lora(second, *targets)
    mctf.fuse(second, r=8)
    images = make_images(first, 2)
    losses = [run(model, images).square().mean() for model in (first, second)]
    torch.testing.assert_close(*losses)
    for model, loss in zip((adapted_last, adapted_first), losses, strict=True):
        loss.backward()
        trainable = {key: value for key, value in model.named_parameters() if value.requires_grad}
        assert trainable
        assert all(value.grad is not None for value in trainable.values())
    with torch.no_grad():
        expected = run(first, images)
        merged = adapted_last.merge_and_unload()
        assert find_stack(merged) is not None
        torch.testing.assert_close(run(merged, images), expected)
        torch.testing.assert_close(run(mctf.unfuse(merged), images), run(mctf.unfuse(second), images))


def test_lora_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = mctf.fuse(make("plain"), r=8)
    adapted = lora(model, "qkv")
    images = make_images(model, 2)
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(mctf.fuse(make("plain"), r=8), tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(images), adapted(images))


def test_accelerate_prepares_trains_and_resumes(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = mctf.fuse(make("plain"), r=8)
    images = make_images(model, 8)
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(F.cross_entropy(prepared(images), LABELS))
    optimizer.step()
    accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        expected = prepared(images)
        for parameter in model.parameters():
            parameter.zero_()
        accelerator.load_state(str(tmp_path))
        assert torch.equal(prepared(images), expected)
    assert accelerator.unwrap_model(prepared) is model
    assert find_stack(mctf.unfuse(model)) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of lightning, about workers and modes
def test_lightning_fits_and_its_checkpoint_loads(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = mctf.fuse(make("plain"), r=8)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            images, labels = batch
            return F.cross_entropy(self.model(images), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    task = Classifier()
    images = make_images(task.model, 8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, LABELS), batch_size=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    fit = lightning.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, enable_checkpointing=False, **quiet
    )
    fit.fit(task, loader)
    fit.save_checkpoint(tmp_path / "last.ckpt")
    loaded = Classifier.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu")
    with torch.no_grad():
        assert torch.equal(loaded.model.eval()(images), task.model.eval()(images))
