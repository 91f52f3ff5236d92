"""Fidelity, speed and the evaluation that puts them side by side."""

import math
import time
from itertools import count

import pytest
import torch
from torch import Tensor, nn

import mctf
from helpers.models import CLASSES, make, make_images
from mctf import MctfError
from mctf.data import Batch
from mctf.evaluation.environment import describe_device, pick_device, versions
from mctf.evaluation.evaluate import Evaluation, Setting, evaluate
from mctf.evaluation.fidelity import Output, average, compare, score
from mctf.evaluation.timing import Pace, timed

CPU = torch.device("cpu")


def output(*logits: list[float]) -> Output:
    return Output(torch.tensor(logits).log(), torch.ones(len(logits), 2))


def make_batches(model: nn.Module, *sizes: int) -> list[Batch]:
    batches = []
    for seed, size in enumerate(sizes):
        labels = torch.arange(size) % CLASSES
        batches.append(Batch(make_images(model, size, seed=seed), labels))
    return batches


class TestFidelity:
    def test_kl_weighs_by_the_unfused_model(self) -> None:
        found = compare(output([0.2, 0.8]), output([0.5, 0.5]), None)
        expected = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)
        assert found.kl == pytest.approx(expected, abs=1e-6)
        assert compare(output([0.5, 0.5]), output([0.2, 0.8]), None).kl != pytest.approx(expected, abs=1e-2)

    def test_kl_is_a_mean_over_images(self) -> None:
        one = compare(output([0.2, 0.8]), output([0.5, 0.5]), None).kl
        two = compare(output([0.2, 0.8], [0.3, 0.7]), output([0.5, 0.5], [0.3, 0.7]), None).kl
        assert one is not None
        assert two == pytest.approx(one / 2)

    def test_agreement_counts_equal_first_answers(self) -> None:
        found = compare(output([0.2, 0.8], [0.6, 0.4], [0.9, 0.1]), output([0.4, 0.6], [0.4, 0.6], [0.8, 0.2]), None)
        assert found.agreement == pytest.approx(200 / 3)

    def test_a_model_agrees_with_itself_where_classes_tie(self) -> None:
        logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).bfloat16().round()
        answers = Output(logits, torch.ones(64, 2))
        assert compare(answers, answers, None).agreement == 100

    def test_accuracy_is_that_of_the_output_not_of_the_reference(self) -> None:
        answers = Output(torch.tensor([[0.0, 6, 5, 4, 3, 2, 1]] * 3), torch.ones(3, 2))
        found = compare(answers, output(*[[1.0] * 7] * 3), torch.tensor([1, 5, 6]))
        assert found.top1 == pytest.approx(100 / 3)
        assert found.top5 == pytest.approx(200 / 3)

    def test_five_answers_of_fewer_classes_are_all(self) -> None:
        assert compare(output([0.2, 0.8]), output([0.2, 0.8]), torch.tensor([0])).top5 == 100

    def test_cosine_is_a_mean_over_images(self) -> None:
        fused = Output(torch.zeros(2, 3), torch.tensor([[1.0, 0.0], [3.0, 3.0]]))
        plain = Output(torch.zeros(2, 3), torch.tensor([[0.0, 2.0], [1.0, 1.0]]))
        assert compare(fused, plain, None).class_cosine == pytest.approx(0.5)

    def test_unknown_is_none(self) -> None:
        same = output([0.2, 0.8])
        found = compare(same, same, None)
        assert (found.top1, found.top5, found.agreement) == (None, None, 100)
        found = compare(same, same, torch.tensor([1]), classifies=False)
        assert (found.top1, found.top5, found.agreement, found.kl) == (None, None, None, None)
        assert found.class_cosine == pytest.approx(1)

    def test_batches_count_by_their_images(self) -> None:
        right, wrong = output([0.2, 0.8]), output([0.8, 0.2])
        three = score(output(*[[0.2, 0.8]] * 3), output(*[[0.2, 0.8]] * 3), torch.ones(3, dtype=torch.int64))
        found = average([three, score(wrong, right, torch.tensor([1]))])
        assert (found.top1, found.top5, found.agreement) == (75, 100, 75)
        assert found.kl == pytest.approx((0.2 * math.log(0.25) + 0.8 * math.log(4)) / 4)


class TestPace:
    def test_warms_up_once_and_gives_the_result(self) -> None:
        calls = count()
        pace = Pace()
        assert [pace.run(lambda: next(calls), images=2, device=CPU) for _ in range(3)] == [1, 2, 3]
        assert [images for images, _ in pace.batches] == [2, 2, 2]

    def test_is_the_median_over_full_batches(self) -> None:
        assert Pace([(8, 1.0), (8, 2.0), (8, 100.0), (1, 1e-3)]).images_per_second == 4

    def test_times_the_call(self) -> None:
        result, seconds = timed(lambda: time.sleep(0.02) or "done", CPU)
        assert result == "done"
        assert 0.02 <= seconds < 2


class TestEnvironment:
    def test_names_device_and_versions(self) -> None:
        assert pick_device("cpu") == CPU
        threads = torch.get_num_threads()
        assert describe_device(CPU).endswith(", 1 thread)" if threads == 1 else f", {threads} threads)")
        assert versions()["mctf"] == mctf.__version__

    @pytest.mark.parametrize("name", ["nonsense", "meta", "cuda:97"])
    def test_refuses_devices_that_are_not_there(self, name: str) -> None:
        with pytest.raises(MctfError, match=f"device '{name}' cannot be used .*: write cpu or cuda"):
            pick_device(name)


def by_hand(model: nn.Module, images: Tensor, setting: Setting) -> Output:
    mctf.fuse(model, setting.method, r=setting.r, blocks=setting.blocks)
    with torch.no_grad():
        found = Output(model(images), model.forward_head(model.forward_features(images), pre_logits=True))
    mctf.unfuse(model)
    return found


class TestEvaluate:
    @pytest.mark.parametrize("name", ["plain", "distilled", "registers", "mean_pool", "map_pool"])
    def test_rows_are_what_one_finds_by_hand(self, name: str) -> None:
        model = make(name)
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
        plain = by_hand(model, images, Setting(r=0))
        for setting, row in zip(settings, rows, strict=True):
            expected = compare(by_hand(model, images, setting), plain, labels)
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

    def test_the_pooled_feature_is_the_final_class_token(self) -> None:
        model = make("plain")
        images = make_images(model, 2)
        with torch.no_grad():
            tokens = model.forward_features(images)
        assert torch.equal(by_hand(model, images, Setting(r=0)).pooled, tokens[:, 0])

    def test_r_zero_shows_the_plain_model(self) -> None:
        model = make("plain")
        settings = [Setting(method, r) for method in ("mctf", "tome") for r in (0, 8)]
        rows = evaluate(model, make_batches(model, 4), settings).rows
        assert [(row.method, row.r) for row in rows] == [("mctf", 0), ("mctf", 8), ("tome", 0), ("tome", 8)]
        for row in (rows[0], rows[2]):
            assert (row.agreement, row.kl) == (100, 0)
            assert row.class_cosine == pytest.approx(1)
            assert row.gflops == mctf.plan(model).gflops_base

    def test_the_plain_model_gets_a_row_where_r_zero_was_not_asked_for(self) -> None:
        model = make("plain")
        found = evaluate(model, make_batches(model, 4), [Setting("tome", 8)])
        assert [(row.method, row.r) for row in found.rows] == [("base", 0), ("tome", 8)]
        assert found.rows[0].gflops == mctf.plan(model).gflops_base

    def test_capped_r_is_noted(self) -> None:
        model = make("plain")
        notes = evaluate(model, make_batches(model, 1), [Setting("mctf", 8), Setting("mctf", 40)]).notes
        assert notes == ("mctf r=40 is capped for want of tokens in blocks 1 to 3",)
        notes = evaluate(model, make_batches(model, 1), [Setting("mctf", [0, 0, 0, 40])]).notes
        assert notes == ("mctf r=[0, 0, 0, 40] is capped for want of tokens in block 3",)
        notes = evaluate(model, make_batches(model, 1), [Setting("mctf", [40, 0, 40, 0])]).notes
        assert notes == ("mctf r=[40, 0, 40, 0] is capped for want of tokens in blocks 0, 2",)

    def test_the_model_is_left_as_it_was(self) -> None:
        model = make("plain").train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        blocks = model.blocks
        evaluate(model, make_batches(model, 2), [Setting("mctf", 8), Setting("tome", 8)])
        assert model.blocks is blocks
        assert model.training
        assert all(module.training for module in model.modules())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_a_model_in_training_mode_is_evaluated_all_the_same(self) -> None:
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

    def test_a_model_without_classifier_has_a_cosine_only(self) -> None:
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

    def test_numbers_that_are_none(self) -> None:
        model = make("plain")
        batches = make_batches(model, 1)
        with torch.no_grad():
            model.head.bias[0] = float("nan")
        with pytest.raises(MctfError, match=r"infinite or undefined numbers in torch\.float32: use"):
            evaluate(model, batches, [])
