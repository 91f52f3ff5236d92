"""The standings of methods at several costs as diagrams over GFLOPs."""

from collections.abc import Callable

from ..analysis.contest import CONTROL, Outcome, Standing
from ..analysis.evaluate import Row
from .plots import Line, Panel

_COST = "GFLOPs"
_OURS = "mctf"
_SAVES = 0.02  # a smaller share of the cost is nothing, and a point beside the plain model would squeeze the others


def panels(outcome: Outcome) -> list[Panel]:
    """What is lost of the plain model, KL or the cosine of features; and accuracy, where classes are known."""
    drawn = []
    if outcome.base.kl is not None:
        lines = _lines(outcome, lambda row: row.kl or None)  # none on a scale of powers where nothing is lost
        drawn.append(Panel(lines, _COST, "KL to the plain model, nats", logarithmic=True))
    else:
        drawn.append(Panel(_lines(outcome, lambda row: row.class_cosine), _COST, "cosine to the plain model"))
    if outcome.base.top1 is not None:
        level = (outcome.base.top1, "plain model")
        drawn.append(Panel(_lines(outcome, lambda row: row.top1), _COST, "top-1 %", level=level))
    return [panel for panel in drawn if panel.lines]


def _lines(outcome: Outcome, value: Callable[[Row], float | None]) -> tuple[Line, ...]:
    """One line a method, through the costs it was measured at; none for what saves nothing."""
    points: dict[str, list[tuple[float, float]]] = {}
    kinds: dict[str, str] = {}
    for standing in outcome.standings:
        y = value(standing.row)
        if y is not None and standing.row.gflops < (1 - _SAVES) * outcome.base.gflops:
            name = _label(standing)
            kinds[name] = standing.entrant.kind
            points.setdefault(name, []).append((standing.row.gflops, y))
    return tuple(
        Line(name, tuple(sorted(found)), strong=name == _OURS, quiet=kinds[name] == CONTROL)
        for name, found in points.items()
    )


def _label(standing: Standing) -> str:
    return f"{standing.row.method} (untrained)" if standing.entrant.untrained else standing.row.method
