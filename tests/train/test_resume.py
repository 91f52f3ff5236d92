"""How a run goes on after a stop, and how it ends when something is wrong."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from helpers.models import make
from helpers.train_feeds import (
    ALONE,
    KilledError,
    Stripes,
    finish,
    finish_logged,
    killing_at,
    make_recipe,
    make_trainer,
    same,
    weights_of,
)
from mctf import MctfError
from mctf.models.loading import load_weights
from mctf.train.build import assemble_around
from mctf.train.checkpoint import step_of
from mctf.train.engine import Trainer
from mctf.train.logging import Record, read_log
from mctf.train.signals import Interruption, StoppedError, interruptible


@pytest.fixture(autouse=True)
def _random_numbers_do_not_matter() -> None:
    torch.seed()  # all randomness of a run follows from its seed


class TestResuming:
    OPTIONS: dict[str, Any] = {  # noqa: RUF012
        "features": {"drop_path_rate": 0.2, "proj_drop_rate": 0.1},
        "ema": 0.9,
        "save_steps": 2,
        "epochs": 3,
        "layer_decay": 0.8,
        "clip": 1.0,
        "warmup_epochs": 1,
        "log_steps": 3,
    }

    @pytest.mark.parametrize("killed", [1, 4, 5, 8])
    def test_goes_on_as_if_it_had_never_stopped(self, tmp_path: Path, killed: int) -> None:
        expected = everything(make_trainer(tmp_path / "a", **self.OPTIONS))
        with pytest.raises(KilledError):
            everything(make_trainer(tmp_path / "b", **self.OPTIONS), on_step=killing_at(killed))
        trainer = make_trainer(tmp_path / "b", **self.OPTIONS)
        assert trainer.resume() == ()
        assert trainer.step == (killed - 1) // 2 * 2  # killed before the save of its own step
        found = everything(trainer)
        assert same(found[0], expected[0])
        assert same(found[1], expected[1])
        assert found[2] == expected[2]

    def test_a_damaged_checkpoint_costs_only_the_steps_since_the_one_before(self, tmp_path: Path) -> None:
        expected = finish(make_trainer(tmp_path / "a", **self.OPTIONS))
        with pytest.raises(KilledError):
            finish(make_trainer(tmp_path / "b", **self.OPTIONS), on_step=killing_at(7))
        last = make_trainer(tmp_path / "b").checkpoints.paths()[0]
        last.write_bytes(last.read_bytes()[:1000])
        trainer = make_trainer(tmp_path / "b", **self.OPTIONS)
        assert trainer.resume() == (f"{last} is damaged, its content does not have the checksum of its name",)
        assert trainer.step == 4
        assert same(finish(trainer), expected)

    def test_nothing_to_resume_is_a_start(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path)
        assert trainer.resume() == ()
        assert trainer.step == 0

    def test_a_finished_run_has_nothing_left_to_do(self, tmp_path: Path) -> None:
        expected = finish(make_trainer(tmp_path))
        trainer = make_trainer(tmp_path)
        trainer.resume()
        assert trainer.step == trainer.steps.total
        assert same(finish(trainer), expected)
        assert trainer.feed.asked == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"lr": 5e-4, "seed": 3},
                r"seed = 0 there, 3 here.*lr|lr = 0.001 there, 0.0005 here; seed = 0 there, 3 here",
            ),
            ({"feed": Stripes(steps=4)}, "3 steps an epoch there, 4 here"),
        ],
    )
    def test_another_run_is_refused(self, tmp_path: Path, options: dict[str, Any], message: str) -> None:
        finish(make_trainer(tmp_path, epochs=1))
        trainer = make_trainer(tmp_path, epochs=1, **options)
        before = weights_of(trainer)
        with pytest.raises(MctfError, match=f"the checkpoint is of another run .*{message}"):
            trainer.resume()
        assert same(weights_of(trainer), before)

    def test_another_number_of_processes_is_refused(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path)
        payload = trainer._snapshots.take(3)
        with pytest.raises(MctfError, match="1 processes there, 2 here"):
            replace(trainer._snapshots, world=2).put_back(payload)

    def test_weights_of_a_checkpoint_can_be_evaluated(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, ema=0.9)
        finish(trainer)
        loaded = make("plain", num_classes=4, seed=5)
        load_weights(loaded, trainer.checkpoints.paths()[0])
        assert same(loaded.state_dict(), trainer.average.module.state_dict())


def everything(trainer: Trainer, **how: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
    """Weights, their average, and the log but for its times, after all steps."""
    weights = finish_logged(trainer, **how)
    rows = [without_time(row) for row in read_log(trainer.recipe.output / "log.csv")]
    return weights, trainer.average.module.state_dict(), rows


def without_time(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "images_per_second"}


class TestStopping:
    def test_a_signal_saves_and_stops(self, tmp_path: Path) -> None:
        expected = finish(make_trainer(tmp_path / "a"))
        interruption = Interruption()

        def interrupt(step: int, record: Record | None) -> None:
            interruption.signal = signal.SIGTERM if step >= 4 else None

        trainer = make_trainer(tmp_path / "b")
        with pytest.raises(StoppedError) as stopped:
            trainer.run(interruption, on_step=interrupt)
        assert stopped.value.number == signal.SIGTERM
        assert 4 <= stopped.value.step <= 6
        trainer = make_trainer(tmp_path / "b")
        trainer.resume()
        assert trainer.step == stopped.value.step
        assert same(finish(trainer), expected)

    def test_a_signal_leaves_running_statistics_as_the_last_step_did(self, tmp_path: Path) -> None:
        def run(output: Path) -> Trainer:
            torch.manual_seed(0)
            model = timm.create_model("lvvit_t", img_size=64, depth=2, embed_dim=24, num_heads=2, num_classes=4)
            return assemble_around(model, Stripes(), make_recipe(output), ALONE)

        expected = finish(run(tmp_path / "a"))
        interruption = Interruption()
        interruption.signal = signal.SIGTERM
        with pytest.raises(StoppedError):
            run(tmp_path / "b").run(interruption)
        trainer = run(tmp_path / "b")
        trainer.resume()
        assert 0 < trainer.step < trainer.steps.total
        assert same(finish(trainer), expected)

    def test_a_signal_in_the_last_step_stops_all_that_would_follow(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path)
        interruption = Interruption()

        def interrupt(step: int, record: Record | None) -> None:
            interruption.signal = signal.SIGINT if step == trainer.steps.total else None

        with pytest.raises(StoppedError):
            trainer.run(interruption, on_step=interrupt)
        assert step_of(trainer.checkpoints.paths()[0]) == trainer.steps.total

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_the_first_signal_is_noted_its_echo_ignored_and_a_later_one_obeyed(
        self, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        obeyed: list[int] = []
        seconds = 0.0
        monkeypatch.setattr("mctf.train.signals.time.monotonic", lambda: seconds)
        before = signal.signal(number, lambda *_: obeyed.append(number))
        try:
            with interruptible() as interruption:
                assert not interruption
                signal.raise_signal(number)
                signal.raise_signal(number)
                assert (interruption.signal, obeyed) == (number, [])
                seconds = 3.0
                signal.raise_signal(number)
                assert obeyed == [number]
            signal.raise_signal(number)
            assert obeyed == [number] * 2
        finally:
            signal.signal(number, before)

    def test_a_loss_that_is_no_number_names_the_step_and_keeps_the_batch(self, tmp_path: Path) -> None:
        feed = Stripes(batch=2, steps=4)
        feed.broken = (1, 3)  # the second of two batches of step 4, counted from 1
        trainer = make_trainer(tmp_path, feed=feed, accumulate=2, save_steps=1)
        with pytest.raises(MctfError, match=r"not finite in step 4; its images are in .*: lower lr, or clip"):
            finish(trainer)
        kept = torch.load(tmp_path / "not-finite-step4-process0.pt")
        assert kept["step"] == 4
        assert kept["lighter"] == trainer.objective.draw(trainer._drawing(3))
        for (images, labels), index in zip(kept["batches"], (2, 3), strict=True):
            expected = feed.make(1, index)
            torch.testing.assert_close(images, expected[0], equal_nan=True, rtol=0, atol=0)
            assert torch.equal(labels, expected[1])
        assert [step_of(path) for path in trainer.checkpoints.paths()] == [3, 2]  # the weights are lost since

    def test_the_last_step_is_looked_at_too(self, tmp_path: Path) -> None:
        feed = Stripes(steps=2)
        feed.broken = (2, 1)
        with pytest.raises(MctfError, match="not finite in step 6"):
            finish(make_trainer(tmp_path, feed=feed))

    def test_a_full_disk_stops_with_a_word(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = make_trainer(tmp_path, save_steps=2)

        def full(payload: Any, file: Any) -> None:
            if payload["step"] == 4:
                raise OSError(28, "No space left on device")
            real_save(payload, file)

        real_save = torch.save
        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(MctfError, match=r"step 4 cannot be written \(No space .*\), that of step 2 is intact"):
            finish(trainer)
