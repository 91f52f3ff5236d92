"""Resuming a run bit for bit, and stopping it: signals, non-finite losses, a full disk."""

import copy
import hashlib
import pickle
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
    read_log,
    same,
    weights_of,
)
from mctf import MctfError
from mctf.models.loading import load_weights
from mctf.train.build import build_around
from mctf.train.checkpoint import step_of
from mctf.train.engine import Trainer
from mctf.train.logging import Record
from mctf.train.signals import StoppedError, StopRequest, catch_signals


@pytest.fixture(autouse=True)
def _unrelated_global_seed() -> None:
    torch.manual_seed(12345)  # all randomness of a run follows from its own seed


def first_slot(state: dict[str, Any]) -> dict[str, Any]:
    return next(iter(state["optimizer"]["state"].values()))


OTHERS: tuple[Any, ...] = ([1, 2], "text", {})  # in place of the whole state
CHANGES: dict[str, Any] = {
    "a list": lambda state: OTHERS[0],
    "text": lambda state: OTHERS[1],
    "an empty table": lambda state: OTHERS[2],
    "no step": lambda state: state.pop("step"),
    "step as text": lambda state: state.update(step="3"),
    "negative step": lambda state: state.update(step=-1),
    "step beyond the end": lambda state: state.update(step=10**9),
    "recipe as text": lambda state: state.update(recipe="lr"),
    "no model": lambda state: state.pop("model"),
    "no average": lambda state: state.pop("model_ema"),
    "no optimizer": lambda state: state.pop("optimizer"),
    "no meters": lambda state: state.pop("meters"),
    "meters of another size": lambda state: state["meters"].update(sums=torch.zeros(99)),
    "a missing weight": lambda state: state["model"].popitem(),
    "an additional weight": lambda state: state["model_ema"].update(more=torch.zeros(1)),
    "a weight of another shape": lambda state: state["model"].update({"head.bias": torch.zeros(7)}),
    "a weight of another dtype": lambda state: state["model"].update({"head.bias": torch.zeros(4, dtype=torch.int8)}),
    "a weight as text": lambda state: state["model"].update({"head.bias": "x"}),
    "no parameter groups": lambda state: state["optimizer"].update(param_groups=[]),
    "an endless learning rate": lambda state: state["optimizer"]["param_groups"][0].update(lr=float("nan")),
    "another weight decay": lambda state: state["optimizer"]["param_groups"][0].update(weight_decay="x"),
    "a moment of another shape": lambda state: first_slot(state).update(exp_avg=torch.zeros(3, 3, 3)),
    "a missing moment": lambda state: first_slot(state).pop("exp_avg_sq"),
    "an unknown parameter": lambda state: state["optimizer"]["state"].update({999: first_slot(state)}),
    "checksums as a list": lambda state: state.update(inputs=[1]),
}


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

    @pytest.mark.parametrize("killed", [5, pytest.param(8, marks=pytest.mark.slow)])
    def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(self, tmp_path: Path, killed: int) -> None:
        expected = everything(make_trainer(tmp_path / "a", **self.OPTIONS))
        with pytest.raises(KilledError):
            everything(make_trainer(tmp_path / "b", **self.OPTIONS), on_step=killing_at(killed))
        trainer = make_trainer(tmp_path / "b", **self.OPTIONS)
        assert trainer.resume() == ()
        assert trainer.step == (killed - 1) // 2 * 2  # killed before the save of its own step
        weights, average, log = everything(trainer)
        assert same(weights, expected[0])
        assert same(average, expected[1])
        assert log == expected[2]

    def test_a_damaged_checkpoint_costs_only_the_steps_since_the_previous_one(self, tmp_path: Path) -> None:
        expected = finish(make_trainer(tmp_path / "a", **self.OPTIONS))
        with pytest.raises(KilledError):
            finish(make_trainer(tmp_path / "b", **self.OPTIONS), on_step=killing_at(7))
        last = make_trainer(tmp_path / "b").checkpoints.paths()[0]
        last.write_bytes(last.read_bytes()[:1000])
        trainer = make_trainer(tmp_path / "b", **self.OPTIONS)
        assert trainer.resume() == (f"{last} is damaged: its content does not match the checksum in its name",)
        assert trainer.step == 4
        assert same(finish(trainer), expected)

    def test_without_a_checkpoint_it_starts(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path)
        assert trainer.resume() == ()
        assert trainer.step == 0

    def test_a_finished_run_does_nothing(self, tmp_path: Path) -> None:
        expected = finish(make_trainer(tmp_path))
        trainer = make_trainer(tmp_path)
        trainer.resume()
        assert trainer.step == trainer.steps.total
        assert same(finish(trainer), expected)
        assert trainer.feed.calls == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"lr": 5e-4, "seed": 3},
                r"seed = 0 there, 3 here.*lr|lr = 0.001 there, 0.0005 here; seed = 0 there, 3 here",
            ),
            ({"feed": Stripes(steps=4)}, "3 steps per epoch there, 4 here"),
        ],
    )
    def test_another_run_is_refused(self, tmp_path: Path, options: dict[str, Any], message: str) -> None:
        finish(make_trainer(tmp_path, epochs=1))
        trainer = make_trainer(tmp_path, epochs=1, **options)
        before = weights_of(trainer)
        with pytest.raises(MctfError, match=f"the checkpoint belongs to another run .*{message}"):
            trainer.resume()
        assert same(weights_of(trainer), before)

    def test_other_images_are_refused(self, tmp_path: Path) -> None:
        finish(make_trainer(tmp_path, epochs=1))
        feed = Stripes()
        feed.digest = "other"
        trainer = make_trainer(tmp_path, epochs=1, feed=feed)
        before = weights_of(trainer)
        with pytest.raises(MctfError, match=r"another run \(the images are others: checksum .* there, other here"):
            trainer.resume()
        assert same(weights_of(trainer), before)

    def test_other_weights_under_the_same_name_are_refused(self, tmp_path: Path) -> None:
        weights = tmp_path / "weights.pt"
        weights.write_bytes(b"first")
        finish(make_trainer(tmp_path / "run", epochs=1, weights=weights))
        make_trainer(tmp_path / "run", epochs=1, weights=weights).resume()
        weights.write_bytes(b"other")
        with pytest.raises(MctfError, match="the weights are others"):
            make_trainer(tmp_path / "run", epochs=1, weights=weights).resume()

    def test_a_checkpoint_without_checksums_resumes_with_a_note(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path)
        state = trainer._state.state_dict(3)
        del state["inputs"]
        trainer.checkpoints.save(3, state)
        assert trainer.resume() == ("the checkpoint has no checksum of the images: they are not compared",)
        assert trainer.step == 3

    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_a_checkpoint_with_other_content_is_refused_and_nothing_changes(self, tmp_path: Path, change: Any) -> None:
        trainer = make_trainer(tmp_path, ema=0.9, epochs=1)
        finish(trainer)
        state = trainer._state.state_dict(3)
        content = copy.deepcopy(state)
        result = change(content)
        trainer.checkpoints.save(9, result if any(result is each for each in OTHERS) else content)
        trainer = make_trainer(tmp_path, ema=0.9, epochs=1)
        before, average = weights_of(trainer), copy.deepcopy(trainer.ema.module.state_dict())
        with pytest.raises(MctfError, match=r"start in another folder$") as refused:
            trainer.resume()
        assert len(str(refused.value)) < 500
        assert same(weights_of(trainer), before)
        assert same(trainer.ema.module.state_dict(), average)
        assert (trainer.step, trainer.optimizer.state_dict()["state"]) == (0, {})

    @pytest.mark.parametrize("content", [b"", b"text", pickle.dumps(print), pickle.dumps(Path("x"))])
    def test_a_right_checksum_of_foreign_content_is_refused_and_no_code_runs(
        self, tmp_path: Path, content: bytes
    ) -> None:
        folder = tmp_path / "checkpoints"
        folder.mkdir()
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        (folder / f"step-00000003-{digest}.pt").write_bytes(content)
        trainer = make_trainer(tmp_path)
        with pytest.raises(MctfError, match=r"\.pt is not a checkpoint of mctf finetune: remove it, or start"):
            trainer.resume()

    def test_a_pickle_that_runs_code_is_not_run(self, tmp_path: Path) -> None:
        class Evil:
            def __reduce__(self) -> Any:
                return Path.touch, (tmp_path / "ran",)

        trainer = make_trainer(tmp_path)
        trainer.checkpoints.save(3, {"step": 3, "model": Evil()})
        with pytest.raises(MctfError, match="is not a checkpoint of mctf finetune"):
            trainer.resume()
        assert not (tmp_path / "ran").exists()

    def test_another_number_of_processes_is_refused(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path)
        payload = trainer._state.state_dict(3)
        with pytest.raises(MctfError, match="1 process there, 2 here"):
            replace(trainer._state, world_size=2).load_state_dict(payload)

    def test_weights_of_a_checkpoint_can_be_evaluated(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, ema=0.9)
        finish(trainer)
        loaded = make("plain", num_classes=4, seed=5)
        load_weights(loaded, trainer.checkpoints.paths()[0])
        assert same(loaded.state_dict(), trainer.ema.module.state_dict())


def everything(trainer: Trainer, **how: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
    """Weights, their average, and the log without its times, after all steps."""
    weights = finish_logged(trainer, **how)
    rows = [without_time(row) for row in read_log(trainer.recipe.output)]
    return weights, trainer.ema.module.state_dict(), rows


def without_time(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "images_per_second"}


class TestStopping:
    def test_a_signal_saves_and_stops(self, tmp_path: Path) -> None:
        expected = finish(make_trainer(tmp_path / "a"))
        stop = StopRequest()

        def interrupt(step: int, record: Record | None) -> None:
            stop.signal = signal.SIGTERM if step >= 4 else None

        trainer = make_trainer(tmp_path / "b")
        with pytest.raises(StoppedError) as stopped:
            trainer.run(stop, on_step=interrupt)
        assert stopped.value.number == signal.SIGTERM
        assert 4 <= stopped.value.step <= 6
        trainer = make_trainer(tmp_path / "b")
        trainer.resume()
        assert trainer.step == stopped.value.step
        assert same(finish(trainer), expected)

    def test_a_signal_keeps_batch_norm_statistics(self, tmp_path: Path) -> None:
        def run(output: Path) -> Trainer:
            torch.manual_seed(0)
            model = timm.create_model("lvvit_t", img_size=64, depth=2, embed_dim=24, num_heads=2, num_classes=4)
            return build_around(model, Stripes(), make_recipe(output), ALONE)

        expected = finish(run(tmp_path / "a"))
        stop = StopRequest()
        stop.signal = signal.SIGTERM
        with pytest.raises(StoppedError):
            run(tmp_path / "b").run(stop)
        trainer = run(tmp_path / "b")
        trainer.resume()
        assert 0 < trainer.step < trainer.steps.total
        assert same(finish(trainer), expected)

    def test_a_signal_in_the_last_step_skips_the_evaluation(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path)
        stop = StopRequest()

        def interrupt(step: int, record: Record | None) -> None:
            stop.signal = signal.SIGINT if step == trainer.steps.total else None

        with pytest.raises(StoppedError):
            trainer.run(stop, on_step=interrupt)
        assert step_of(trainer.checkpoints.paths()[0]) == trainer.steps.total

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_the_first_signal_is_recorded_its_repetition_ignored_and_a_later_one_handled(
        self, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handled: list[int] = []
        seconds = 0.0
        monkeypatch.setattr("mctf.train.signals.time.monotonic", lambda: seconds)
        before = signal.signal(number, lambda *_: handled.append(number))
        try:
            with catch_signals() as stop:
                assert not stop
                signal.raise_signal(number)
                signal.raise_signal(number)
                assert (stop.signal, handled) == (number, [])
                seconds = 3.0
                signal.raise_signal(number)
                assert handled == [number]
            signal.raise_signal(number)
            assert handled == [number] * 2
        finally:
            signal.signal(number, before)

    def test_a_non_finite_loss_names_the_step_and_saves_the_batches(self, tmp_path: Path) -> None:
        feed = Stripes(batch=2, steps=4)
        feed.broken = (1, 3)  # the second of two batches of step 4, counted from 1
        trainer = make_trainer(tmp_path, feed=feed, accumulate=2, save_steps=1)
        with pytest.raises(MctfError, match=r"not finite in step 4; its images are in .*: lower lr, or clip"):
            finish(trainer)
        kept = torch.load(tmp_path / "not-finite-step4-process0.pt")
        assert kept["step"] == 4
        assert kept["lighter"] == trainer.draw_lighter(3)
        for (images, labels), index in zip(kept["batches"], (2, 3), strict=True):
            expected = feed.make(1, index)
            torch.testing.assert_close(images, expected[0], equal_nan=True, rtol=0, atol=0)
            assert torch.equal(labels, expected[1])
        assert [step_of(path) for path in trainer.checkpoints.paths()] == [3, 2]  # later weights are not finite

    def test_batches_that_cannot_be_saved_leave_no_half_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(payload: Any, file: Any) -> None:
            file.write(b"half")
            raise OSError(28, "No space left on device")

        feed = Stripes(steps=2)
        feed.broken = (0, 0)
        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(
            MctfError, match=r"step 1; its images cannot be saved \(.*No space left on device\): lower lr"
        ):
            finish(make_trainer(tmp_path, feed=feed))
        assert list(tmp_path.iterdir()) == []

    def test_the_last_step_is_checked(self, tmp_path: Path) -> None:
        feed = Stripes(steps=2)
        feed.broken = (2, 1)
        with pytest.raises(MctfError, match="not finite in step 6"):
            finish(make_trainer(tmp_path, feed=feed))

    def test_a_full_disk_stops_the_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = make_trainer(tmp_path, save_steps=2)

        def full(payload: Any, file: Any) -> None:
            if payload["step"] == 4:
                raise OSError(28, "No space left on device")
            real_save(payload, file)

        real_save = torch.save
        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(MctfError, match=r"step 4 cannot be written \(No space .*\), that of step 2 is intact"):
            finish(trainer)
