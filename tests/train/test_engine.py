"""One training step: objective, optimizer, moving average, in mixed precision and by several methods."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mctf
from helpers.models import make
from helpers.train_feeds import (
    KilledError,
    Stripes,
    finish,
    finish_logged,
    killing_at,
    make_trainer,
    read_log,
    same,
    weights_of,
)
from mctf import MctfError
from mctf.api import fused_stack
from mctf.models.loading import load_weights
from mctf.train.engine import Trainer
from mctf.train.finalize import final_model, write_weights


@pytest.fixture(autouse=True)
def _unrelated_global_seed() -> None:
    torch.manual_seed(12345)  # all randomness of a run follows from its own seed


def gradient_norm(model: nn.Module) -> float:
    return torch.stack([each.grad.norm() for each in model.parameters()]).norm().item()


def first_gradient(trainer: Trainer) -> dict[str, Tensor]:
    """The gradient of the first step, after clipping."""
    gradients: list[dict[str, Tensor]] = []

    def record(*_: object) -> None:
        gradients.append({name: each.grad.clone() for name, each in trainer.model.named_parameters()})

    trainer.optimizer.register_step_pre_hook(record)
    with pytest.raises(KilledError):
        finish(trainer, on_step=killing_at(1))
    return gradients[0]


class TestSteps:
    @pytest.mark.slow
    def test_learns(self, tmp_path: Path) -> None:
        feed = Stripes(batch=8, steps=16)
        trainer = make_trainer(tmp_path, feed=feed, epochs=4, ema=0.9, clip=1.0, log_steps=16)
        finish_logged(trainer)
        images, labels = zip(*(feed.make(99, step) for step in range(8)), strict=True)
        model = final_model(trainer)
        accuracy = (model(torch.cat(images)).argmax(1) == torch.cat(labels)).float().mean()
        assert accuracy > 0.8
        rows = read_log(tmp_path)
        assert [row["step"] for row in rows] == [16, 32, 48, 64]
        assert rows[-1]["total"] < rows[0]["total"] / 2

    def test_the_same_seed_gives_the_same_weights_bit_for_bit(self, tmp_path: Path) -> None:
        options = {"features": {"drop_path_rate": 0.2}, "ema": 0.9}
        first = finish(make_trainer(tmp_path / "a", **options))
        assert same(first, finish(make_trainer(tmp_path / "b", **options)))
        assert not same(first, finish(make_trainer(tmp_path / "c", seed=1, **options)))

    def test_r_prime_varies_over_steps_and_is_reproducible(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path)
        drawn = [trainer.draw_lighter(step) for step in range(20)]
        assert len(set(drawn)) > 5
        assert drawn == [trainer.draw_lighter(step) for step in range(20)]

    def test_accumulated_batches_equal_one_large_batch(self, tmp_path: Path) -> None:
        feed = Stripes(batch=8, steps=2)

        class Halves(Stripes):
            def make(self, epoch: int, step: int) -> tuple[Tensor, Tensor]:
                images, labels = feed.make(epoch, step // 2)
                part = slice(4 * (step % 2), 4 * (step % 2) + 4)
                return images[part], labels[part]

        whole = first_gradient(make_trainer(tmp_path / "a", feed=feed, objective="cross-entropy"))
        halves = Halves(batch=4, steps=4)
        parts = first_gradient(make_trainer(tmp_path / "b", feed=halves, objective="cross-entropy", accumulate=2))
        torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-5)  # sums in another order

    def test_batches_of_an_incomplete_step_are_dropped(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, feed=Stripes(steps=5), accumulate=2)
        finish(trainer)
        assert trainer.step == 6
        assert trainer.feed.calls == [(0, 0), (1, 0), (2, 0)]

    def test_too_few_images_for_a_step(self, tmp_path: Path) -> None:
        with pytest.raises(MctfError, match="12 images cannot fill one step of this size: lower batch or acc"):
            make_trainer(tmp_path, accumulate=4)

    def test_one_step_is_adamw_on_the_loss(self, tmp_path: Path) -> None:
        feed = Stripes(steps=1)
        options: dict[str, Any] = {"epochs": 1, "objective": "cross-entropy", "method": "none", "weight_decay": 0.0}
        weights = finish(make_trainer(tmp_path, feed=feed, **options))
        model = make("plain", num_classes=4).train()
        images, labels = feed.make(0, 0)
        F.cross_entropy(model(images), labels).backward()
        torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0).step()
        torch.testing.assert_close(weights, model.state_dict(), rtol=0, atol=2e-5)

    def test_clipping_bounds_the_gradient_and_the_log_has_its_norm_before(self, tmp_path: Path) -> None:
        norms: list[float] = []
        trainer = make_trainer(tmp_path, clip=0.01, epochs=1)
        trainer.optimizer.register_step_pre_hook(lambda *_: norms.append(gradient_norm(trainer.model)))
        finish_logged(trainer)
        assert norms == pytest.approx([0.01] * 3, rel=1e-3)
        assert all(row["grad_norm"] > 0.1 for row in read_log(tmp_path))

    def test_the_moving_average_lags_behind_and_is_the_result(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, ema=0.99)
        start = weights_of(trainer)
        raw = finish(trainer)
        averaged = final_model(trainer).state_dict()
        name = "blocks.0.mlp.fc1.weight"
        assert (averaged[name] - start[name]).norm() < (raw[name] - start[name]).norm()
        write_weights(trainer)
        loaded = make("plain", num_classes=4, seed=5)
        load_weights(loaded, tmp_path / "model.safetensors")
        assert same(loaded.state_dict(), averaged)
        load_weights(loaded, tmp_path / "model-raw.safetensors")
        assert same(loaded.state_dict(), raw)

    def test_the_result_is_unfused_with_the_weights_of_the_last_step(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path)
        raw = finish(trainer)
        write_weights(trainer)
        model = final_model(trainer)
        assert not model.training
        with pytest.raises(MctfError, match="not fused"):
            fused_stack(model)
        assert same(model.state_dict(), raw)
        assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["model.safetensors"]

    @pytest.mark.parametrize("method", ["tome", "mctf_exact", "free_drop"])
    def test_other_methods_train(self, tmp_path: Path, method: str) -> None:
        trainer = make_trainer(tmp_path, method=method, epochs=1)
        assert trainer.model.blocks.method.name == method
        before = weights_of(trainer)
        assert not same(finish(trainer), before)

    def test_mixed_precision_and_channels_last(self, tmp_path: Path) -> None:
        full = finish(make_trainer(tmp_path / "a", epochs=1))
        trainer = make_trainer(tmp_path / "b", epochs=1, dtype="bfloat16", channels_last=True)
        mixed = finish(trainer)
        assert mixed["head.weight"].dtype == torch.float32
        assert mixed["patch_embed.proj.weight"].is_contiguous(memory_format=torch.channels_last)
        assert not same(mixed, full)
        torch.testing.assert_close(mixed["head.weight"], full["head.weight"], rtol=0, atol=5e-3)

    def test_the_term_of_a_method_is_added(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        term = staticmethod(lambda model, images, labels, branches, infer: branches[0].logits.square().mean())
        monkeypatch.setattr(mctf.methods.MCTF, "extra_loss", term, raising=False)
        finish_logged(make_trainer(tmp_path, epochs=1))
        assert all(row["extra"] > 0 for row in read_log(tmp_path))
