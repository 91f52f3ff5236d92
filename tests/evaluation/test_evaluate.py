"""An evaluation measures what the fused models give by hand, and refuses what it cannot measure."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mctf
from helpers.models import CLASSES, make, make_images
from mctf import MctfError
from mctf.data import Batch
from mctf.evaluation import evaluate as evaluating
from mctf.evaluation.evaluate import Evaluation, Setting, evaluate
from mctf.evaluation.fidelity import Output, average, run_model, score


def make_batches(model: nn.Module, *sizes: int) -> list[Batch]:
    batches = []
    for seed, size in enumerate(sizes):
        labels = torch.arange(size) % CLASSES
        batches.append(Batch(make_images(model, size, seed=seed), labels))
    return batches


def by_hand(model: nn.Module, images: Tensor, setting: Setting) -> Output:
    mctf.fuse(model, setting.method, r=setting.r, blocks=setting.blocks)
    with torch.no_grad():
        found = run_model(model, images)
    mctf.unfuse(model)
    return found


class TestEvaluate:
    @pytest.mark.parametrize("name", ["plain", "distilled", "registers", "mean_pool", "map_pool"])
    def test_rows_are_what_models_fused_by_hand_give(self, name: str) -> None:
        """In float64: batches of other sizes round differently, and float32 may then match other tokens."""
        model = make(name).double()
        batches = make_batches(model, 5, 3)
        settings = [
            Setting("mctf", 6),
            Setting("tome", 0.2),
            Setting("mctf", 8, blocks=(1, 2)),
            Setting("mctf", "fast"),
        ]
        rows = evaluate(model, batches, settings).rows[1:]
        images, labels = torch.cat([batch.pixels for batch in batches]), torch.arange(8) % CLASSES
        labels[5:] = torch.arange(3)
        baseline = by_hand(model, images, Setting(r=0))
        for setting, row in zip(settings, rows, strict=True):
            expected = average(score(by_hand(model, images, setting), baseline, labels))
            assert (row.method, row.r) == (setting.method, setting.r)
            assert (row.top1, row.top5) == (expected.top1, expected.top5)
            assert row.agreement == expected.agreement
            assert row.kl == pytest.approx(expected.kl, abs=1e-4)
            assert row.kl is not None
            assert row.kl > 1e-3  # the settings do change these models
            assert row.class_cosine == pytest.approx(expected.class_cosine, abs=1e-4)
            size = (images.shape[2], images.shape[3])
            made = mctf.plan(model, r=setting.r, method=setting.method, blocks=setting.blocks, image_size=size)
            assert row.gflops == made.gflops

    def test_patches_are_compared_where_every_token_is_returned(self) -> None:
        for name, dense in (("plain", False), ("plain", True), ("mean_pool", False)):
            model = make(name)
            settings = [Setting("mctf", 0, dense=dense), Setting("mctf", 8, dense=dense)]
            plain, fused = (row.patch_cosine for row in evaluate(model, make_batches(model, 4), settings).rows)
            if name == "plain" and not dense:
                assert plain is fused is None
            else:
                assert plain == pytest.approx(1)
                assert 0 < fused < 0.9999

    def test_r_zero_is_the_baseline(self) -> None:
        model = make("plain")
        settings = [Setting(method, r) for method in ("mctf", "tome") for r in (0, 8)]
        rows = evaluate(model, make_batches(model, 4), settings).rows
        assert [(row.method, row.r) for row in rows] == [("mctf", 0), ("mctf", 8), ("tome", 0), ("tome", 8)]
        for row in (rows[0], rows[2]):
            assert (row.agreement, row.kl) == (100, 0)
            assert row.class_cosine == pytest.approx(1)
            assert row.gflops == mctf.plan(model).gflops_base

    def test_the_baseline_gets_a_row_where_no_setting_has_r_zero(self) -> None:
        model = make("plain")
        found = evaluate(model, make_batches(model, 4), [Setting("tome", 8)])
        assert [(row.method, row.r) for row in found.rows] == [("baseline", 0), ("tome", 8)]
        assert found.rows[0].gflops == mctf.plan(model).gflops_base

    def test_capped_r_is_noted(self) -> None:
        model = make("plain")
        notes = evaluate(model, make_batches(model, 1), [Setting("mctf", 8), Setting("mctf", 40)]).notes
        assert notes == ("mctf r=40 is capped (too few tokens) in blocks 1 to 3",)
        notes = evaluate(model, make_batches(model, 1), [Setting("mctf", [0, 0, 0, 40])]).notes
        assert notes == ("mctf r=[0, 0, 0, 40] is capped (too few tokens) in block 3",)
        notes = evaluate(model, make_batches(model, 1), [Setting("mctf", [40, 0, 40, 0])]).notes
        assert notes == ("mctf r=[40, 0, 40, 0] is capped (too few tokens) in blocks 0, 2",)

    def test_the_model_is_not_changed(self) -> None:
        model = make("plain").train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        blocks = model.blocks
        evaluate(model, make_batches(model, 2), [Setting("mctf", 8), Setting("tome", 8)])
        assert model.blocks is blocks
        assert model.training
        assert all(module.training for module in model.modules())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_a_model_in_training_mode_is_evaluated_in_eval_mode(self) -> None:
        model = make("plain", proj_drop_rate=0.5)
        batches = make_batches(model, 4)
        expected = fidelities(evaluate(model, batches, [Setting("mctf", 8)]))
        assert fidelities(evaluate(model.train(), batches, [Setting("mctf", 8)])) == expected

    def test_batches_may_come_from_a_generator_and_without_labels(self) -> None:
        model = make("plain")
        found = evaluate(model, (Batch(make_images(model, 2)) for _ in range(2)), [Setting("mctf", 8)])
        assert found.images == 4
        assert [row.top1 for row in found.rows] == [None, None]
        assert all(row.images_per_second > 0 for row in found.rows)

    def test_a_model_without_classifier_has_only_a_cosine(self) -> None:
        model = make("plain")
        batches = make_batches(model, 2)
        model.reset_classifier(0)
        found = evaluate(model, batches, [Setting("mctf", 8)])
        assert (found.rows[1].agreement, found.rows[1].kl, found.rows[1].top1) == (None, None, None)
        assert found.rows[1].class_cosine is not None
        assert found.notes == ("the model has no classifier: agreement, KL and accuracy are unknown",)

    def test_runs_in_the_dtype_of_the_model(self) -> None:
        model = make("plain")
        batches = make_batches(model, 2)
        found = evaluate(model.bfloat16(), batches, [Setting("mctf", 8)])
        assert found.rows[1].agreement is not None


class TestWork:
    """How often a model is fused and copied, and its stem counted: each of them takes time on a large model."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
        calls = {"fuse": 0, "copy": 0, "deepcopy": 0}

        def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls[name] += isinstance(args[0], nn.Module)
                return function(*args, **kwargs)

            return call

        monkeypatch.setattr(evaluating, "fuse", counted("fuse", evaluating.fuse))
        monkeypatch.setattr(evaluating, "copy_sharing_weights", counted("copy", evaluating.copy_sharing_weights))
        deepcopy = copy.deepcopy

        def count_modules(value: Any, memo: Any = None) -> Any:
            calls["deepcopy"] += isinstance(value, nn.Module) and not memo
            return deepcopy(value, memo)

        monkeypatch.setattr(copy, "deepcopy", count_modules)
        return calls

    @pytest.mark.parametrize(
        ("settings", "fused"),
        [
            ([Setting("mctf", 0), Setting("mctf", 8)], 1),
            ([Setting(method, r) for method in ("mctf", "tome") for r in (0, 4, 8)], 4),
            ([Setting("ats", 1)], 1),
        ],
    )
    def test_one_fuse_per_fused_row_and_one_stem_for_all(
        self, calls: dict[str, int], settings: list[Setting], fused: int
    ) -> None:
        model = make("plain")
        batches = make_batches(model, 2)
        calls.update(dict.fromkeys(calls, 0))
        evaluate(model, batches, settings)
        assert calls == {"fuse": fused, "copy": fused + 1, "deepcopy": 1}


def fidelities(found: Evaluation) -> list[tuple[object, ...]]:
    return [(row.top1, row.top5, row.agreement, row.kl, row.class_cosine) for row in found.rows]


class TestEvaluateRefuses:
    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            (Setting("tomee", 8), "unknown method 'tomee': did you mean 'tome'"),
            (Setting("tomee", 0), "unknown method 'tomee': did you mean 'tome'"),
            (Setting("mctf", -1), "r=-1 is negative"),
            (Setting("mctf", 0, blocks=(9,)), "blocks names 9, but the model has blocks 0 to 3"),
            (Setting("mctf", 8, options=(("pooling", [1]),)), r"pooling=\[1\] is unknown"),
        ],
    )
    def test_bad_settings_before_the_first_batch(self, setting: Setting, message: str) -> None:
        def batches() -> object:
            pytest.fail("a batch was read")
            yield

        with pytest.raises(MctfError, match=message):
            evaluate(make("plain"), batches(), [setting])  # type: ignore[arg-type]

    def test_a_fused_model(self) -> None:
        model = mctf.fuse(make("plain"), r=8)
        with pytest.raises(MctfError, match="fused already"):
            evaluate(model, make_batches(model, 1), [])

    def test_no_images(self) -> None:
        with pytest.raises(MctfError, match="there are no images to evaluate"):
            evaluate(make("plain"), [], [Setting("mctf", 8)])

    def test_non_finite_logits(self) -> None:
        model = make("plain")
        batches = make_batches(model, 1)
        with torch.no_grad():
            model.head.bias[0] = float("nan")
        with pytest.raises(MctfError, match=r"infinite or undefined numbers in torch\.float32: use"):
            evaluate(model, batches, [])
