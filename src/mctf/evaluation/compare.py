"""Which method stays closest to the baseline's predictions when all methods cost the same.

Each method is brought to every target cost (`match_flops`), and all of them run over the same images in one pass
(`evaluate`), batch by batch in turn, which also times them. A method that does not support the model, or cannot reach
the target, is listed with the reason. A method whose cost does not depend on r is measured too, but not ranked.

Axes: B images, 3 H W.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..api import fuse, fused_stack
from ..data import Batch
from ..errors import MctfError
from ..methods import make_method
from ..methods._layers import UntrainedWarning, stashed_layers
from ..methods.base import Method
from ..models.loading import copy_sharing_weights
from ..planning import FusionRequest, plan
from ..schedule_file import Schedule
from .evaluate import Row, Setting, evaluate
from .fidelity import Scores
from .match_flops import ReductionSweep, sweep_reductions
from .significance import Difference

PARAMETER_FREE, LEARNED, CONTROL = "parameter-free", "learned", "control"
_MCTF, _VARIANT = "mctf", "mctf_exact"
_TOLERANCE = 0.02  # a relative distance from the target cost above this gets a note


@dataclass(frozen=True)
class Candidate:
    """A method to be measured. target: GFLOPs it was brought to; None where its cost does not depend on r.

    kind: "parameter-free", "learned" or "control". untrained: whether it has layers without trained weights.
    """

    setting: Setting
    target: float | None
    kind: str
    untrained: bool


@dataclass(frozen=True)
class Refusal:
    """A method that is not measured. target: the cost it cannot reach; None where it does not support the model."""

    method: str
    target: float | None
    reason: str


@dataclass(frozen=True)
class Result:
    """A candidate with its metrics, averaged (row) and per image (scores)."""

    candidate: Candidate
    row: Row
    scores: Scores = field(compare=False, repr=False)

    @property
    def loss(self) -> float:
        """Distance from the baseline: KL, or 1 - cosine of the features where there are no classes."""
        return 1 - (self.row.class_cosine or 0.0) if self.row.kl is None else self.row.kl

    def behind(self, other: "Result") -> Difference:
        """By how much the loss is above that of another result on the same images."""
        return Difference.of(self._losses, other._losses)

    @property
    def _losses(self) -> Tensor:
        return 1 - self.scores.class_cosine if self.scores.kl is None else self.scores.kl

    @property
    def metric(self) -> str:
        """The metric behind `loss`, for a sentence: "KL 0.05" or "cosine 0.9500"."""
        row = self.row
        return f"cosine {row.class_cosine:.4f}" if row.kl is None else f"KL {row.kl:.3g}"

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        candidate = self.candidate
        facts = {"target_gflops": candidate.target, "kind": candidate.kind, "untrained": candidate.untrained}
        return {**asdict(self.row), **facts}


@dataclass(frozen=True)
class Comparison:
    """Results from the lowest target to the highest, within a target by increasing loss; those without target last."""

    images: int
    baseline: Row
    results: tuple[Result, ...]
    notes: tuple[str, ...]


def find_candidates(
    model: nn.Module,
    methods: Sequence[str],
    targets: Sequence[float],
    *,
    images: Tensor,
    trim_last: bool | None = None,
    tick: Callable[[], object] = lambda: None,
) -> tuple[list[Candidate], list[Refusal]]:
    """Bring every method to every target (GFLOPs) on an unfused model; `tick` is called after each method.

    images: B 3 H W on the device and in the dtype of the model, a sample to measure the cost of adaptive methods on.
    trim_last: as for `mctf.fuse`.
    """
    candidates: list[Candidate] = []
    refusals: list[Refusal] = []
    for method in methods:
        try:
            sweep = sweep_reductions(model, method, images=images, trim_last=trim_last)
        except MctfError as refused:
            refusals.append(Refusal(method, None, str(refused)))
        else:
            for target in targets if sweep is not None else (None,):
                try:
                    candidates.append(_candidate(model, method, sweep, target, images, trim_last))
                except MctfError as refused:
                    refusals.append(Refusal(method, target, str(refused)))
        tick()
    return candidates, refusals


def _candidate(
    model: nn.Module,
    method: str,
    sweep: ReductionSweep | None,
    target: float | None,
    images: Tensor,
    trim_last: bool | None,
) -> Candidate:
    """A candidate that has run on one image: some refusals are only raised in a forward pass."""
    made = make_method(method, {})
    r = made.default_r if sweep is None or target is None else sweep.closest(target)
    with warnings.catch_warnings(action="ignore", category=UntrainedWarning), torch.inference_mode():
        fused = fuse(copy_sharing_weights(model), method, r=r, trim_last=trim_last).eval()
        fused(images[:1])
    untrained = bool(fused_stack(fused).layers) and not stashed_layers(model)
    return Candidate(Setting(method, r, trim_last=trim_last), target, kind_of(made), untrained)


def schedule_candidate(
    model: nn.Module, schedule: Schedule, *, name: str, images: Tensor, trim_last: bool | None = None
) -> Candidate:
    """A tuned schedule as a candidate at its own cost; raises MctfError where it is of another model."""
    options = dict(schedule.options)
    request = FusionRequest.of(None, r=None, flops=None, blocks=None, schedule=schedule, options={})
    label = f"{schedule.method} ({Path(name).stem})"
    setting = Setting.of(request, model, options=options, label=label, trim_last=trim_last)
    size = (images.shape[2], images.shape[3])
    gflops = plan(model, schedule=schedule, image_size=size, trim_last=trim_last).gflops
    return Candidate(setting, gflops, kind_of(request.method), untrained=False)


def kind_of(method: Method) -> str:
    return CONTROL if method.control else LEARNED if method.learned else PARAMETER_FREE


def compare(
    model: nn.Module,
    batches: Iterable[Batch],
    candidates: Sequence[Candidate],
    *,
    tick: Callable[[], object] = lambda: None,
) -> Comparison:
    """Measure the baseline and all candidates on the same images; `tick` is called after each batch of each of them."""
    evaluation = evaluate(model, batches, [candidate.setting for candidate in candidates], tick=tick)
    measured = zip(candidates, evaluation.rows[1:], evaluation.scores[1:], strict=True)
    results = sorted(
        (Result(candidate, row, scores) for candidate, row, scores in measured),
        key=lambda result: (result.candidate.target or float("inf"), result.loss),
    )
    notes = list(evaluation.notes)
    for result in results:
        name, target, gflops = result.row.method, result.candidate.target, result.row.gflops
        if target is None:
            notes.append(f"{name} costs {gflops:.2f} GFLOPs whatever r is: it is not ranked")
        elif abs(gflops / target - 1) > _TOLERANCE:
            notes.append(f"{name} costs {gflops:.3f} GFLOPs, {gflops / target - 1:+.1%} off the target {target:g}")
    return Comparison(evaluation.images, evaluation.rows[0], tuple(results), tuple(notes))


def verdicts(results: Sequence[Result]) -> list[str]:
    """For every target, which method is closest to the baseline, and whether MCTF is among those without parameters."""
    lines = []
    for target in sorted({each.candidate.target for each in results if each.candidate.target is not None}):
        ranked = sorted((each for each in results if each.candidate.target == target), key=lambda each: each.loss)
        lines.append(f"at {target:g} GFLOPs {ranked[0].row.method} is closest to the baseline: {ranked[0].metric}")
        lines.extend(_verdict_on_mctf(ranked))
    return lines


def _verdict_on_mctf(ranked: Sequence[Result]) -> list[str]:
    """A line on MCTF against the best other parameter-free method; none where one of the two is missing."""
    by_name = {each.row.method: each for each in ranked if each.candidate.kind == PARAMETER_FREE}
    mctf, variant = by_name.pop(_MCTF, None), by_name.pop(_VARIANT, None)
    if mctf is None or not by_name:
        return []
    rival = next(iter(by_name.values()))
    name = rival.row.method
    suffix = "" if variant is None else f"; its variant {_VARIANT} has {variant.metric}"
    lowest = f"the lowest {'distance' if mctf.row.kl is None else 'KL'} of the parameter-free methods"
    difference = mctf.behind(rival)
    if not difference.clear:
        return [
            f"{_MCTF} and {name}, the best other parameter-free method, are too close to call on these images: "
            f"{mctf.metric} and {rival.metric}, difference {difference.size()}{suffix}"
        ]
    if mctf.loss <= rival.loss:
        return [f"{_MCTF} has {lowest}: {mctf.metric}; {name} is next with {rival.metric}{suffix}"]
    less = f"{1 - rival.loss / mctf.loss:.0%} less than {_MCTF} with {mctf.metric}"
    return [f"{_MCTF} does not have {lowest}: {name} has {rival.metric}, {less}{suffix}"]
