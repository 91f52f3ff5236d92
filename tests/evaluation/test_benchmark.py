"""Contenders of a benchmark, the check before the timing, and the sentences about the result."""

from dataclasses import replace

import pytest
import timm
import torch
from torch import Tensor, nn

import mctf
from mctf.evaluation import benchmark
from mctf.evaluation.benchmark import (
    BASELINE,
    BASELINE_MATMUL,
    FREE_DROP,
    FREE_DROP_CONV,
    LABELS,
    BenchmarkConfig,
    Measurement,
    inconclusive,
    make_contenders,
    verdicts,
)
from mctf.evaluation.timing import timed
from mctf.hosts import patch_embed
from mctf.hosts.patch_embed import MatmulPatchEmbed

CONFIG = BenchmarkConfig(("mctf", "tome"), 8, 2, (160, 160))


@pytest.fixture
def model() -> nn.Module:
    return timm.create_model("test_vit").eval()


def measurement(name: str, milliseconds: float, speedup: float, over_matmul: float | None = None) -> Measurement:
    return Measurement(name, LABELS.get(name, name), 16, 8, milliseconds, 0.0, 1.0, speedup, over_matmul, 1.0)


class TestContenders:
    def test_the_matmul_baseline_is_unfused_and_embeds_by_a_product(self, model: nn.Module) -> None:
        contenders = make_contenders(model, CONFIG, matmul=True)
        assert list(contenders) == [BASELINE, BASELINE_MATMUL, "mctf", "tome", FREE_DROP, FREE_DROP_CONV]
        products = {name for name, each in contenders.items() if isinstance(each.patch_embed.proj, MatmulPatchEmbed)}
        assert products == {BASELINE_MATMUL, "mctf", "tome", FREE_DROP}
        assert type(contenders[FREE_DROP_CONV].patch_embed.proj) is nn.Conv2d
        assert type(contenders[BASELINE_MATMUL].blocks) is type(model.blocks)

    @torch.inference_mode()
    def test_the_product_computes_what_the_convolution_computes(
        self, model: nn.Module, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images = torch.randn(2, 3, 160, 160, dtype=torch.float64)
        contenders = make_contenders(model.double(), CONFIG, matmul=True)
        expected = model(images)
        for name in (BASELINE, BASELINE_MATMUL):
            assert torch.equal(contenders[name](images), expected)  # on a CPU both use the convolution
        monkeypatch.setattr(patch_embed, "_reduced_precision_on_gpu", lambda images: True)
        assert torch.equal(contenders[BASELINE](images), expected)
        product = contenders[BASELINE_MATMUL](images)
        torch.testing.assert_close(product, expected)
        assert not torch.equal(product, expected)  # it sums in another order

    def test_weights_are_shared_and_the_model_is_not_changed(self, model: nn.Module) -> None:
        contenders = make_contenders(model, CONFIG, matmul=True)
        assert type(model.patch_embed.proj) is nn.Conv2d
        for each in contenders.values():
            assert each.patch_embed.proj.weight is model.patch_embed.proj.weight

    def test_where_the_product_is_not_used_there_is_one_baseline(self, model: nn.Module) -> None:
        assert list(make_contenders(model, CONFIG, matmul=False)) == [BASELINE, "mctf", "tome", FREE_DROP]

    @pytest.mark.parametrize("amount", [8, 0.2, "fast"])
    @pytest.mark.parametrize(
        "methods", [("ward", "tome"), ("tome",), ("mctf_exact",), ("ats", "evit"), ("free_drop", "ward")]
    )
    @torch.inference_mode()
    def test_as_many_tokens_are_dropped_as_the_first_method_removes(
        self, model: nn.Module, methods: tuple[str, ...], amount: int | float | str
    ) -> None:
        config = replace(CONFIG, methods=methods, r=amount)
        contenders = make_contenders(model, config, matmul=False)
        first = next(name for name in methods if name != FREE_DROP)
        planned = mctf.plan(model, method=first, image_size=160, **config.reduction(model, first))
        with mctf.trace(contenders[FREE_DROP]) as trace:
            contenders[FREE_DROP](torch.randn(1, 3, 160, 160))
        assert trace.token_counts == planned.token_counts
        assert planned.token_counts[-1] < planned.image_tokens
        bound = mctf.plan(model, method=FREE_DROP, image_size=160, **config.reduction(model, FREE_DROP))
        assert bound.trimmed == planned.trimmed
        assert bound.gflops_run <= planned.gflops_run

    def test_both_speedups_are_measured(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(benchmark, "_repeats", lambda *_: 1)
        original = benchmark.make_contenders
        forced = lambda model, config, **_: original(model, config, matmul=True)  # noqa: E731
        monkeypatch.setattr(benchmark, "make_contenders", forced)
        results = {each.name: each for each in benchmark.benchmark(model, replace(CONFIG, rounds=1))}
        assert list(results) == [BASELINE, BASELINE_MATMUL, "mctf", "tome", FREE_DROP, FREE_DROP_CONV]
        assert (results[BASELINE].speedup, results[BASELINE_MATMUL].speedup_over_matmul) == (1, 1)
        for each in results.values():
            assert each.speedup_over_matmul == pytest.approx(results[BASELINE_MATMUL].milliseconds / each.milliseconds)
        assert results[BASELINE_MATMUL].gflops == results[BASELINE].gflops > results["mctf"].gflops
        assert results[BASELINE_MATMUL].difference < 1e-5


class WrongInHalfPrecision(nn.Module):
    """Outputs 5 in float32 and 1 in anything less."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        return torch.full((len(images), 10), 5.0 if self.weight.dtype == torch.float32 else 1.0)


class TestCheck:
    @torch.inference_mode()
    def test_a_wrong_model_is_not_timed(self, model: nn.Module) -> None:
        images = torch.randn(2, 3, 160, 160)
        assert benchmark.check(mctf.fuse(model, r=8), images, "mctf") < 1e-5
        with pytest.raises(mctf.MctfError, match=r"mctf is wrong on this machine: its output is 80\.0% off"):
            benchmark.check(WrongInHalfPrecision().bfloat16(), images.bfloat16(), "mctf")

    @torch.inference_mode()
    def test_the_checked_code_is_the_timed_code(self, model: nn.Module) -> None:
        mctf.fuse(model, r=8)
        images, calls = torch.randn(6, 3, 160, 160), []
        assert benchmark.check(model, images, "mctf", run=lambda images: calls.append(1) or model(images)) < 1e-5
        assert calls == [1]
        with pytest.raises(mctf.MctfError, match="is wrong on this machine"):
            benchmark.check(model, images, "mctf", run=lambda images: 2 * model(images))

    def test_a_model_that_is_no_vit_is_refused(self) -> None:
        with pytest.raises(mctf.MctfError, match="ResNet"):
            benchmark.benchmark(timm.create_model("test_resnet"), BenchmarkConfig(("mctf",), 8, 1, (64, 64)))


class TestVerdicts:
    def test_both_speedups_and_the_upper_bound(self) -> None:
        results = [
            measurement(BASELINE, 10, 1.0, 0.9),
            measurement(BASELINE_MATMUL, 9, 1.11, 1.0),
            measurement("mctf", 12, 0.83, 0.75),
            measurement("tome", 6, 1.67, 1.5),
            measurement(FREE_DROP, 5, 2.0, 1.8),
        ]
        assert verdicts(results) == [
            "mctf r=16 does not pay here: 0.83x the baseline's speed",
            "tome r=16: 1.67x, 1.50x over the baseline with a matmul patch embedding, "
            "20% slower than the free-drop upper bound",
        ]

    def test_one_baseline_is_explained(self) -> None:
        results = [measurement(BASELINE, 10, 1.0), measurement("tome", 4, 2.5), measurement(FREE_DROP, 5, 2.0)]
        speed, note = verdicts(results)
        assert speed == "tome r=16: 2.50x, 20% faster than the free-drop upper bound"
        assert note.startswith("every contender embeds patches by the model's own convolution")

    def test_launch_bound_contenders_are_named(self) -> None:
        busy, waiting = measurement("mctf", 6, 1.67), measurement("mctf_exact", 5, 2.0)
        results = [replace(busy, launch_milliseconds=3.0), replace(waiting, launch_milliseconds=4.9)]
        assert "waits for the host: mctf_exact; --compile --mode reduce-overhead" in verdicts(results)[-1]
        assert "launch-bound" not in "".join(verdicts([busy, replace(waiting, launch_milliseconds=2.0)]))

    def test_nothing_is_concluded_on_a_busy_machine(self) -> None:
        stable = [measurement(BASELINE, 10, 1.0), measurement("tome", 6, 1.67)]
        assert inconclusive(stable) is None
        (line,) = verdicts([stable[0], replace(stable[1], spread=0.3)])
        assert line.startswith("the machine is busy (timings of one model differ by 30% between rounds)")

    def test_an_upper_bound_below_the_baseline_means_a_busy_machine(self) -> None:
        baseline, tome = measurement(BASELINE, 290, 1.0), measurement("tome", 2900, 0.1)
        slow = replace(measurement(FREE_DROP, 1533, 0.19), spread=0.002, gflops=baseline.gflops / 2)
        (line,) = verdicts([baseline, tome, slow])
        assert "0.19x the baseline's speed, though it only saves work" in line
        assert "nothing can be concluded" in line
        small_r = replace(slow, gflops=baseline.gflops * 0.99)
        launch_bound = replace(slow, launch_milliseconds=slow.milliseconds)
        for legitimate in (small_r, launch_bound):
            assert "tome r=16 does not pay here" in verdicts([baseline, tome, legitimate])[0]


def test_only_some_modes_use_cuda_graphs() -> None:
    modes = {None: False, "default": False, "reduce-overhead": True, "max-autotune": True}
    for mode, used in modes.items():
        assert replace(CONFIG, compiled=mode).uses_cuda_graphs == used


def test_launching_ends_before_the_work_does() -> None:
    assert benchmark._launch_milliseconds(lambda: None, torch.device("cpu")) is None
    if torch.cuda.is_available():
        x = torch.randn(4096, 4096, device="cuda")
        _, seconds = timed(lambda: x @ x @ x @ x, x.device)
        assert benchmark._launch_milliseconds(lambda: x @ x @ x @ x, x.device) < seconds * 1e3
