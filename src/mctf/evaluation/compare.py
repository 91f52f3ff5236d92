"""Methods against each other at equal cost: who loses least of what the plain model says.

Each method is brought to every wanted cost (`budget`), and all of them run over the same images in one pass
(`evaluate`), batch by batch in turn, which is also when they are timed. A method that cannot serve the model, or not
at that cost, is listed with the reason. One whose cost is its own is measured beside the others and not ranked.

Axes: B images, 3 H W.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
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
from .evaluate import Row, Setting, evaluate
from .fidelity import Scores
from .match_flops import Ladder, find_ladder
from .significance import Difference

FREE, LEARNED, CONTROL = "parameter-free", "learned", "control"
_CONTROLS = ("random", "free_drop")
_OURS, _VARIANT = "mctf", "mctf_exact"
_OFF = 0.02  # a cost so far from the wanted one, as a share of it, is worth a note


@dataclass(frozen=True)
class Entrant:
    """A method that takes part. target: GFLOPs it was brought to; None where its cost is its own.

    kind: "parameter-free", "learned" or "control". untrained: whether it has layers that nobody has trained.
    """

    setting: Setting
    target: float | None
    kind: str
    untrained: bool


@dataclass(frozen=True)
class Refusal:
    """A method that does not take part. target: the cost it was asked for; None where it suits the model at none."""

    method: str
    target: float | None
    reason: str


@dataclass(frozen=True)
class Standing:
    """An entrant and what was measured of it, in the mean and image by image."""

    entrant: Entrant
    row: Row
    scores: Scores = field(compare=False, repr=False)

    @property
    def loss(self) -> float:
        """What is lost of the plain model: KL, or the angle of the features where there are no classes."""
        return 1 - (self.row.class_cosine or 0.0) if self.row.kl is None else self.row.kl

    def behind(self, other: "Standing") -> Difference:
        """How much more is lost than by another one on the same images."""
        return Difference.of(self._losses, other._losses)

    @property
    def _losses(self) -> Tensor:
        return 1 - self.scores.class_cosine if self.scores.kl is None else self.scores.kl

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        entrant = self.entrant
        about = {"target_gflops": entrant.target, "kind": entrant.kind, "untrained": entrant.untrained}
        return {**asdict(self.row), **about}


@dataclass(frozen=True)
class Outcome:
    """Standings from the cheapest target to the dearest, those who lose least first; own costs last."""

    images: int
    base: Row
    standings: tuple[Standing, ...]
    notes: tuple[str, ...]


def enter(
    model: nn.Module,
    methods: Sequence[str],
    targets: Sequence[float],
    *,
    images: Tensor,
    tick: Callable[[], object] = lambda: None,
) -> tuple[list[Entrant], list[Refusal]]:
    """Bring every method to every target (GFLOPs) on an unfused model; `tick` is called after each method.

    images: B 3 H W, where and as the model is, a sample to measure the cost on where each image decides.
    """
    entrants: list[Entrant] = []
    refusals: list[Refusal] = []
    for method in methods:
        try:
            ladder = find_ladder(model, method, images=images)
        except MctfError as refused:
            refusals.append(Refusal(method, None, str(refused)))
        else:
            for target in targets if ladder is not None else (None,):
                try:
                    entrants.append(_entrant(model, method, ladder, target, images))
                except MctfError as refused:
                    refusals.append(Refusal(method, target, str(refused)))
        tick()
    return entrants, refusals


def _entrant(model: nn.Module, method: str, ladder: Ladder | None, target: float | None, images: Tensor) -> Entrant:
    """Tried on one image: a few refusals only come when the model runs."""
    made = make_method(method, {})
    with warnings.catch_warnings(action="ignore", category=UntrainedWarning), torch.inference_mode():
        r = made.default_r if ladder is None or target is None else ladder.nearest(target)
        fused = fuse(copy_sharing_weights(model), method, r=r).eval()
        fused(images[:1])
    untrained = bool(fused_stack(fused).layers) and not stashed_layers(model)
    return Entrant(Setting(method, r), target, kind_of(made), untrained)


def kind_of(method: Method) -> str:
    """Learned is what has layers or a loss of its own."""
    if method.name in _CONTROLS:
        return CONTROL
    learned = type(method).make_layers is not Method.make_layers or hasattr(method, "extra_loss")
    return LEARNED if learned else FREE


def compete(model: nn.Module, batches: Iterable[Batch], entrants: Sequence[Entrant]) -> Outcome:
    """Measure the plain model and all entrants on the same images."""
    found = evaluate(model, batches, [entrant.setting for entrant in entrants])
    measured = zip(entrants, found.rows[1:], found.scores[1:], strict=True)
    standings = [Standing(entrant, row, scores) for entrant, row, scores in measured]
    standings.sort(key=lambda each: (each.entrant.target or float("inf"), each.loss))
    return Outcome(found.images, found.rows[0], tuple(standings), (*found.notes, *_remarks(standings)))


def _remarks(standings: Sequence[Standing]) -> list[str]:
    lines = []
    for each in standings:
        name, target, gflops = each.row.method, each.entrant.target, each.row.gflops
        if target is None:
            lines.append(f"{name} decides by itself what it costs, {gflops:.2f} GFLOPs here: it is not ranked")
        elif abs(gflops / target - 1) > _OFF:
            lines.append(f"{name} costs {gflops:.3f} GFLOPs, {gflops / target - 1:+.1%} of the wanted {target:g}")
    return lines


def verdicts(standings: Sequence[Standing]) -> list[str]:
    """For every target, who loses least, and whether MCTF does of those without parameters."""
    lines = []
    for target in sorted({each.entrant.target for each in standings if each.entrant.target is not None}):
        ranked = sorted((each for each in standings if each.entrant.target == target), key=lambda each: each.loss)
        lines.append(f"at {target:g} GFLOPs {ranked[0].row.method} loses least: {_told(ranked[0])}")
        lines.extend(_verdict_on_ours(ranked))
    return lines


def _verdict_on_ours(ranked: Sequence[Standing]) -> list[str]:
    """A line on MCTF beside the best parameter-free method of others; none where one of both is missing."""
    by_name = {each.row.method: each for each in ranked if each.entrant.kind == FREE}
    ours, variant = by_name.pop(_OURS, None), by_name.pop(_VARIANT, None)
    if ours is None or not by_name:
        return []
    rival = next(iter(by_name.values()))
    measure = "KL" if ours.row.kl is not None else "distance"
    beside = "" if variant is None else f"; {_VARIANT}, its variant, has {_told(variant)}"
    of_all = f"the lowest {measure} of the parameter-free methods"
    apart = ours.behind(rival)
    if not apart.clear:
        words = f"too close to call on these images: {_told(ours)} and {_told(rival)}, {apart.size()} apart{beside}"
        return [f"{_OURS} and {rival.row.method}, the best other of the parameter-free methods, are {words}"]
    if ours.loss <= rival.loss:
        return [f"{_OURS} keeps {of_all}: {_told(ours)}, and {rival.row.method}, the next, {_told(rival)}{beside}"]
    less = f"{1 - rival.loss / ours.loss:.0%} less than {_OURS} with {_told(ours)}"
    return [f"{_OURS} does not keep {of_all}: {rival.row.method} has {_told(rival)}, {less}{beside}"]


def _told(standing: Standing) -> str:
    row = standing.row
    return f"cosine {row.class_cosine:.4f}" if row.kl is None else f"KL {row.kl:.3g}"
