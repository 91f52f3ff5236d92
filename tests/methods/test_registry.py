"""Methods of one's own: what the registry takes and refuses, and what `Method` derives from `run` alone."""

import runpy
from typing import Any, ClassVar

import pytest
import timm
import torch

import mctf
from helpers.families.own import EXAMPLES
from helpers.models import ONE_PER_OPS, make, make_images, run
from mctf import MctfError
from mctf.methods import _REGISTRY, Assignment, BlockOutput, Method

LowNorm: Any = runpy.run_path(str(EXAMPLES / "own_method.py"))["LowNorm"]  # the method of the example
del _REGISTRY["low_norm"]  # tests register it anew


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cls in list(_REGISTRY.items()):
        monkeypatch.setitem(_REGISTRY, name, cls)
    monkeypatch.setattr("mctf.methods._REGISTRY", dict(_REGISTRY))


@pytest.mark.parametrize("name", [*ONE_PER_OPS, "plain", "hf_vit"])
@torch.no_grad()
def test_a_method_needs_nothing_but_run(name: str) -> None:
    mctf.register_method(LowNorm)
    assert "low_norm" in mctf.methods()
    model = make(name)
    images = make_images(model, 2)
    baseline = run(model, images)
    plan = mctf.plan(model, method="low_norm", r=5)
    mctf.fuse(model, "low_norm", r=5)
    with mctf.trace(model) as trace:
        run(model, images)
    assert trace.token_counts == plan.token_counts
    assert trace.dropped().sum(dim=1).tolist() == [plan.image_tokens - plan.token_counts[-1]] * 2
    mctf.set_r(model, 0)
    assert torch.equal(run(model, images), baseline)


def test_its_cost_is_counted() -> None:
    mctf.register_method(LowNorm)
    with torch.device("meta"):
        model = timm.create_model("deit_tiny_patch16_224")
    plan = mctf.plan(model, method="low_norm", r=16)
    free = mctf.plan(model, method="free_drop", r=16)
    tokens = [step.tokens for step in plan.reductions[1:]]
    extra = sum(5 * count * 192 + count * 192 * 192 for count in tokens)  # a norm and the values of every token
    assert plan.gflops == plan.gflops_run == pytest.approx(free.gflops + extra / 1e9, rel=1e-12)


def test_a_dropping_method_may_take_more_than_half() -> None:
    mctf.register_method(LowNorm)
    model = make("plain")
    assert mctf.plan(model, method="low_norm", r=0.7).reductions[1].num_reduced == int(0.7 * 64)
    assert mctf.plan(model, method="free_drop", r=0.7).reductions[1].num_reduced == int(0.7 * 64)
    assert mctf.plan(model, method="tome", r=0.7).reductions[1].num_reduced < 33


def test_the_decorator_makes_options_of_the_fields() -> None:
    @mctf.register_method
    class Tuned(LowNorm):
        name: ClassVar[str] = "tuned"
        strength: float = 2.0

    mctf.fuse(make("plain"), "tuned", r=4, strength=3.0)
    with pytest.raises(MctfError, match="did you mean 'strength'"):
        mctf.fuse(make("plain"), "tuned", r=4, strenght=3.0)


def _without_run() -> Any:
    class NoRun(Method):
        name: ClassVar[str] = "no_run"

    return NoRun


def _without_name() -> Any:
    class NoName(LowNorm):
        name: ClassVar[str] = "no name"

    return NoName


@pytest.mark.parametrize(
    ("make_class", "message"),
    [
        (_without_run, "NoRun lacks run: a method needs at least `run`"),
        (_without_name, "NoName.name must be a word"),
        (lambda: dict, "expected a subclass of mctf.methods.Method"),
        (lambda: LowNorm(), "expected a subclass of mctf.methods.Method"),
    ],
)
def test_what_is_no_method_is_refused(make_class: Any, message: str) -> None:
    with pytest.raises(MctfError, match=message):
        mctf.register_method(make_class())


def test_an_assignment_without_weights_is_refused_where_it_is_made() -> None:
    x, assignment = torch.zeros(1, 4, 8), Assignment(torch.tensor([[0, 1, 1, 2]]), 3)
    with pytest.raises(MctfError, match="lacks weights"):
        BlockOutput(x[:, :3], None, assignment)
    with pytest.raises(MctfError, match="lacks an assignment"):
        BlockOutput(x, None, None, torch.ones(1, 4))


def test_what_a_method_is_is_declared() -> None:
    declared = {
        name: {flag for flag in ("learned", "adaptive", "restores_tokens", "drops", "control") if getattr(cls, flag)}
        for name, cls in _REGISTRY.items()
    }
    assert declared["mctf"] == declared["tome"] == declared["bat"] == set()
    assert declared["a_vit"] == {"learned", "adaptive", "restores_tokens", "drops"}
    assert declared["free_drop"] == declared["random"] == {"drops", "control"}
    assert {name for name, flags in declared.items() if "learned" in flags} == {
        "a_vit",
        "dynamic_vit",
        "ia_red2",
        "spvit",
    }


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = (EXAMPLES / "own_method.py").read_text()
    method = code[code.index("@mctf.register_method") : code.index("if __name__")]
    assert len([line for line in method.splitlines() if line.strip() and not line.strip().startswith('"""')]) <= 15
    runpy.run_path(str(EXAMPLES / "own_method.py"), run_name="__main__")
    assert "tokens per block: [101, 97, 93, 89, 85, 81]" in capsys.readouterr().out
