"""One image through an unfused model and its fused copies: what is reported, what is kept, what is refused."""

import gc
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image
from torch import nn

import mctf
from helpers.images import make_picture
from mctf.data import Preprocessing
from mctf.evaluation.fidelity import kl_divergence
from mctf.models.loading import copy_sharing_weights, create
from mctf.viz import inspection
from mctf.viz.inspection import Fusion, Inspector

WARD, MCTF = Fusion("ward", 0.6), Fusion("mctf", 0.7)
CPU = torch.device("cpu")


@pytest.fixture
def image() -> Image.Image:
    return make_picture(0, width=200, height=180)


def inspector(**options) -> Inspector:
    return Inspector({"test_vit": create("test_vit")}, device=CPU, **{"rounds": 1, **options})


@torch.no_grad()
def test_figures_are_those_of_the_plan_and_of_the_models(image) -> None:
    subject = inspector(rounds=3)
    model = subject.models["test_vit"]
    seen = subject.inspect(image, model="test_vit", fusions=[WARD, MCTF], batch=2)
    pixels = Preprocessing.of(model).transform()(image)[None]
    reference = model(pixels).detach().double()
    assert [seen.baseline.name, *(each.name for each in seen.fused)] == ["unfused", "ward", "mctf"]
    assert (seen.baseline.share, seen.baseline.kl, seen.baseline.agrees) == (1, 0, True)
    for fusion, result in zip((WARD, MCTF), seen.fused, strict=True):
        planned = mctf.plan(model, method=fusion.method, flops=fusion.flops)
        assert list(result.token_counts) == planned.token_counts
        assert result.gflops == planned.gflops
        assert result.share == planned.gflops / planned.gflops_base
        logits = mctf.fuse(copy_sharing_weights(model), fusion.method, flops=fusion.flops)(pixels).double()
        assert result.kl == pytest.approx(float(kl_divergence(reference, logits)), abs=1e-6)  # same kernels, one thread
        probabilities = logits.softmax(dim=1)[0]
        assert [each.probability for each in result.answers] == pytest.approx(probabilities.topk(5).values.tolist())
        assert len(result.frames) == len(planned.reductions)
        assert result.timing.median > 0
        assert result.speedup == seen.baseline.timing.median / result.timing.median
    assert "2 copies of the image on this machine" in seen.conditions


def test_models_are_loaded_and_run_in_one_thread(image) -> None:
    """A second pool of threads makes every pass on a CPU a third slower."""
    seen: set[int] = set()

    def load() -> nn.Module:
        seen.add(threading.get_ident())
        model = create("test_vit")
        model.patch_embed.register_forward_hook(lambda *_: seen.add(threading.get_ident()))
        return model

    subject = Inspector({"test_vit": load}, device=CPU, rounds=1)
    for _ in range(2):
        caller = threading.Thread(target=subject.inspect, args=[image], kwargs={"model": "test_vit", "fusions": [MCTF]})
        caller.start()
        caller.join()
    assert len(seen) == 1
    assert threading.get_ident() not in seen


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_a_model_that_loads() -> None:
    program = """
import signal
import time
import torch
from mctf.viz.inspection import Inspector

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in programs in the background

def load():
    print("loading", flush=True)
    time.sleep(300)

Inspector({"slow": load}, device=torch.device("cpu"))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert err.endswith(b"KeyboardInterrupt\n")


def test_an_inspector_that_is_gone_leaves_no_thread() -> None:
    before = set(threading.enumerate())  # those of inspectors of other tests may end at any time
    subject = inspector()
    (thread,) = set(threading.enumerate()) - before
    del subject
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_the_pictures_change_where_tokens_are_fused(image) -> None:
    subject = inspector()
    (result,) = subject.inspect(image, model="test_vit", fusions=[MCTF]).fused
    for block in range(1, len(result.frames)):
        fused = result.token_counts[block] < result.token_counts[block - 1]
        assert (result.frames[block] is not result.frames[block - 1]) == fused


def test_all_of_the_budget_is_the_unfused_model(image) -> None:
    (result,) = inspector().inspect(image, model="test_vit", fusions=[Fusion("mctf", 1.0)]).fused
    assert (result.share, result.kl, result.agrees) == (1, 0, True)


def test_fused_models_are_kept_up_to_a_number(image, monkeypatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(
        inspection, "fuse", lambda model, method, **options: made.append(method) or mctf.fuse(model, method, **options)
    )
    subject = inspector(kept=2)
    for fusions in ([WARD, MCTF], [MCTF, WARD], [Fusion("tome", 0.7)], [WARD], [MCTF]):
        subject.inspect(image, model="test_vit", fusions=fusions)
    assert made == ["ward", "mctf", "tome", "mctf"], "the least recently used one makes room"


def test_two_requests_at_once_do_not_disturb_each_other(monkeypatch) -> None:
    subject, running, most = inspector(), [], []
    original = inspection.time_interleaved

    def observed(*arguments, **options):
        running.append(1)
        most.append(len(running))
        timings = original(*arguments, **options)
        running.pop()
        return timings

    monkeypatch.setattr(inspection, "time_interleaved", observed)
    wanted = [(make_picture(seed), fusions) for seed, fusions in enumerate(([WARD], [MCTF], [WARD, MCTF]))]

    def ask(number: int) -> list[tuple[float | None, tuple[int, ...]]]:
        picture, fusions = wanted[number]
        seen = subject.inspect(picture, model="test_vit", fusions=fusions)
        return [(each.kl, each.token_counts) for each in seen.fused]

    alone = [ask(number) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(ask, range(3)))
    for before, after in zip(alone, together, strict=True):
        assert [counts for _, counts in after] == [counts for _, counts in before]
        assert [kl for kl, _ in after] == pytest.approx([kl for kl, _ in before])
    assert len({kl for each in alone for kl, _ in each}) == 4, "the requests differ"
    assert most == [1] * 6, "one is timed at a time"


def test_a_model_without_a_classifier_has_no_answers(image) -> None:
    subject = Inspector({"features": create("test_vit", num_classes=0)}, device=CPU, rounds=1)
    (result,) = subject.inspect(image, model="features", fusions=[WARD]).fused
    assert (result.answers, result.kl, result.agrees) == ((), None, None)
    assert result.frames


@pytest.mark.parametrize(
    ("model", "fusion", "complaint"),
    [
        ("test_vit", Fusion("ward", 0.01), "cannot keep as little as 0.01"),
        ("test_vit", Fusion("mctf", 2.0), "is no share of the baseline's FLOPs"),
        ("test_vit", Fusion("dynamic_vit", 0.6), "dynamic_vit needs training: choose from mctf"),
        ("test_vit", Fusion("wrad", 0.6), "did you mean 'ward'?"),
        ("test_vit2", WARD, "did you mean 'test_vit'?"),
    ],
)
def test_what_is_refused(image, model: str, fusion: Fusion, complaint: str) -> None:
    with pytest.raises(mctf.MctfError) as caught:
        inspector().inspect(image, model=model, fusions=[fusion])
    assert complaint in str(caught.value)


def test_what_cannot_be_fused_is_refused_before_a_page_is_served() -> None:
    with pytest.raises(mctf.MctfError, match="ResNet cannot be fused"):
        Inspector({"resnet18": create("resnet18")}, device=CPU)
    with pytest.raises(mctf.MctfError, match="no model"):
        Inspector({}, device=CPU)
