"""The criteria by name, as the paper's ablations combine them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, ClassVar

from ..evaluation.evaluate import Row, Setting, evaluate
from ..evaluation.fidelity import Scores
from ..planning import plan
from .runner import Experiment, Result, Subject, Task

_TEMPERATURES = {"sim": "tau_sim", "info": "tau_info", "size": "tau_size"}

ALL = "sim+info+size"
SUBSETS = ("sim", "info", "size", "sim+info", "sim+size", "info+size", ALL)


def options_of(criteria: str) -> dict[str, Any]:
    """Options of `mctf.fuse` under which these criteria alone count, as in "sim+info"; none of them for all three."""
    used = criteria.split("+")
    return {temperature: 0.0 for name, temperature in _TEMPERATURES.items() if name not in used}


# MERGED from mctf.reproduce.studies:
# Experiments that compare settings by what they do to the model's answers: off the shelf, and every ablation.
#
# Each runs the plain model and all of its settings over the same images and gives, for each, KL and agreement to the
# plain model, accuracy where classes are known, and GFLOPs in the paper's account. The paper's ablations are of a
# fine-tuned DeiT-S and judge by accuracy; here no weight is trained, so KL is what tells settings apart. KL and
# correctness of single images are kept, so that settings can be compared image by image.

R = 16  # of the paper's ablations
CURVE = (4, 8, 12, R, 20)  # where a study is shown over r
TEMPERATURES = ("1", "1/5", "1/10", "1/20", "1/40", "1/100")
_PLAIN = Setting(r=0)
DEFAULTS = {"tau_sim": "1", "tau_info": "1/20", "tau_size": "1/40"}


@dataclass(frozen=True)
class Variant:
    """One setting, and where it stands in the study's tables: a group and a label, both as the paper's data has them.

    slow: left out by --quick.
    """

    group: str
    label: str
    setting: Setting
    slow: bool = False


def variant(group: str, label: str, *, r: int = R, method: str = "mctf", slow: bool = False, **options: Any) -> Variant:
    return Variant(group, label, Setting(method, r, options=tuple(sorted(options.items()))), slow)


@dataclass(frozen=True)
class Study(Experiment):
    """Variants, evaluated side by side."""

    name: str
    title: str
    measures: str
    sources: tuple[str, ...]
    variants: tuple[Variant, ...]

    form: ClassVar[int] = 2

    def chosen(self, quick: bool) -> list[Variant]:
        return [each for each in self.variants if not (quick and each.slow)]

    def steps(self, task: Task) -> int:
        return len(task.seen.batches) * self._weight(task.quick)

    def run(self, task: Task) -> Result:
        """The plain model as "base", and a row a variant; a setting that variants or studies share is run once."""
        variants, known = self.chosen(task.quick), _known_rows(task)
        settings = [_PLAIN, *dict.fromkeys(each.setting for each in variants)]
        missing = [setting for setting in settings if setting not in known]
        measured = evaluate(task.seen.model, task.batches(self._weight(task.quick)), missing)
        found = zip(missing, measured.rows, measured.scores, strict=True)
        rows = known | {setting: _as_dict(row, scores) for setting, row, scores in found}
        return {
            "images": measured.images,
            "base": rows[_PLAIN],
            "rows": [{**rows[each.setting], "group": each.group, "label": each.label} for each in variants],
            "capped": _capped(task.seen, settings),
        }

    def _weight(self, quick: bool) -> int:
        return 1 + len({each.setting for each in self.chosen(quick)})


def _as_dict(row: Row, scores: Scores) -> dict[str, Any]:
    """The row, with "by_image": KL and top-1 (0 or 100) of each image; None where unknown."""
    kl = None if scores.kl is None else [float(f"{value:.6g}") for value in scores.kl.tolist()]
    top1 = None if scores.top1 is None else [int(value) for value in scores.top1.tolist()]
    return {**asdict(row), "by_image": {"kl": kl, "top1": top1}}


def _known_rows(task: Task) -> dict[Setting, dict[str, Any]]:
    """What other studies have found, by setting; the plain model is not among them, as all others need its answers."""
    known: dict[Setting, dict[str, Any]] = {}
    for study in STUDIES:
        if study.name in task.results:
            pairs = zip(study.chosen(task.quick), task.results[study.name]["rows"], strict=True)
            known |= {variant.setting: row for variant, row in pairs}
    return known


def _capped(subject: Subject, settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Method, r and blocks, counted from 1, wherever there are too few tokens to fuse r of them."""
    capped = []
    for each in settings:
        made = plan(
            subject.model,
            r=each.r,
            method=each.method,
            image_size=subject.preprocessing.image_size,
            **dict(each.options),
        )
        blocks = [block for block, step in enumerate(made.reductions, start=1) if step.num_reduced < step.num_requested]
        case = {"method": each.method, "r": each.r, "blocks": blocks}
        if blocks and case not in capped:
            capped.append(case)
    return capped


def _off_the_shelf() -> tuple[Variant, ...]:
    return tuple(
        variant(method, str(r), r=r, method=method, slow=r not in (8, R, 20))
        for method in ("mctf", "tome")
        for r in (1, 2, 4, 8, 12, R, 20)
    )


def _criteria() -> tuple[Variant, ...]:
    curves = ("sim", "info", "sim+info", ALL)
    return tuple(
        variant(criteria, str(r), r=r, slow=r != R, **options_of(criteria))
        for criteria in SUBSETS
        for r in (CURVE if criteria in curves else (R,))
    )


def _ahead() -> tuple[Variant, ...]:
    return tuple(
        variant(attention, str(r), r=r, slow=r not in (8, R), attention=attention)
        for attention in ("one_step_ahead", "previous")
        for r in CURVE
    )


def _design() -> tuple[Variant, ...]:
    """The paper's lines by its own names, and variants that it does not have."""
    return (
        variant("matching", "one_way", bidirectional=False),
        variant("matching", "bidirectional"),
        variant("pooling", "average", pooling="mean"),
        variant("pooling", "size", pooling="size"),
        variant("pooling", "max", pooling="max"),
        variant("pooling", "weighted_average"),
        variant("attention", "precise", attention="precise"),
        variant("attention", "approximated"),
        variant("attention", "exact", attention="exact"),
        variant("proportional", "off", proportional=False),
        variant("proportional", "on"),
    )


def _temperatures() -> tuple[Variant, ...]:
    variants = []
    for option, default in DEFAULTS.items():
        for label in TEMPERATURES:
            changed: dict[str, Any] = {} if label == default else {option: float(Fraction(label))}
            slow = label not in ("1", "1/100", default)
            variants.append(variant(option, label, slow=slow, **changed))
    return tuple(variants)


OFF_THE_SHELF = Study(
    "off_the_shelf",
    "Without training",
    "MCTF against ToMe over r, no weight trained.",
    ("Table 3",),
    _off_the_shelf(),
)
CRITERIA = Study(
    "criteria",
    "Which criteria",
    "MCTF with every subset of its criteria: similarity, informativeness, size.",
    ("Figure 7a",),
    _criteria(),
)
AHEAD = Study(
    "one_step_ahead",
    "One step ahead",
    "Informativeness from the coming attention against that of the block before.",
    ("Figure 7b",),
    _ahead(),
)
DESIGN = Study(
    "design",
    "Design choices",
    f"Matching, pooling and attention of fused tokens, each changed alone, at r = {R}.",
    ("Table 4",),
    _design(),
)
TEMPERATURE = Study(
    "temperatures",
    "Temperatures",
    f"Each temperature changed alone, at r = {R}.",
    ("Table A",),
    _temperatures(),
)
STUDIES = (OFF_THE_SHELF, CRITERIA, AHEAD, DESIGN, TEMPERATURE)
