"""Experiments that compare settings by their predictions: MCTF and ToMe without training, and every ablation.

Each study runs the baseline (the unfused model) and all of its settings over the same images. It reports KL and
agreement with the baseline, accuracy where labels are available, and GFLOPs in the paper's convention. The paper's
ablations are of a fine-tuned DeiT-S and compare accuracy; here no weight is trained, so KL separates the settings. KL
and correctness per image are stored, so that settings can be compared image by image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

from ..core.schedule import ReductionSpec
from ..evaluation.evaluate import Row, Setting, evaluate
from ..evaluation.fidelity import Scores
from ..planning import plan
from .records import Result
from .runner import Experiment, Subject, Task

R = 16  # of the paper's ablations
CURVE = (4, 8, 12, R, 20)  # the r of curves
ALL = "sim+info+size"
SUBSETS = ("sim", "info", "size", "sim+info", "sim+size", "info+size", ALL)
TEMPERATURES = ("1", "1/5", "1/10", "1/20", "1/40", "1/100")
DEFAULTS = {"tau_sim": "1", "tau_info": "1/20", "tau_size": "1/40"}
_OPTION_OF_CRITERION = {"sim": "tau_sim", "info": "tau_info", "size": "tau_size"}
_BASELINE = Setting(r=0)


def criteria_options(criteria: str) -> dict[str, Any]:
    """Options of `mctf.fuse` that switch off all criteria but these, as in "sim+info"; empty for all three."""
    used = criteria.split("+")
    return {option: 0.0 for name, option in _OPTION_OF_CRITERION.items() if name not in used}


@dataclass(frozen=True)
class PerImage:
    """KL and top-1 (0 or 100) of each image; None without a classifier or without labels."""

    kl: tuple[float, ...] | None = None
    top1: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StudyRow(Row):
    """A row of the evaluation with its values per image. group, label: its place in the study's tables."""

    by_image: PerImage = PerImage()
    group: str = ""
    label: str = ""

    @classmethod
    def of(cls, row: Row, scores: Scores) -> "StudyRow":
        kl = None if scores.kl is None else tuple(float(f"{value:.6g}") for value in scores.kl.tolist())
        top1 = None if scores.top1 is None else tuple(int(value) for value in scores.top1.tolist())
        return cls(**vars(row), by_image=PerImage(kl, top1))


@dataclass(frozen=True)
class CappedSetting:
    """A method and r for which some blocks (counted from 1) have fewer than r tokens to fuse."""

    method: str
    r: ReductionSpec
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class StudyResult(Result):
    """The baseline, and one row per variant."""

    images: int
    base: StudyRow
    rows: tuple[StudyRow, ...]
    capped: tuple[CappedSetting, ...]

    @property
    def has_kl(self) -> bool:
        """Whether the model has a classifier, so that predictions can be compared."""
        return self.base.kl is not None

    @property
    def groups(self) -> dict[str, list[StudyRow]]:
        """Rows by group, in order."""
        groups: dict[str, list[StudyRow]] = {}
        for row in self.rows:
            groups.setdefault(row.group, []).append(row)
        return groups

    def to_json(self, *, per_image: bool = True) -> dict[str, Any]:
        """per_image: False omits the values per image, which are most of the result."""
        result = super().to_json()
        for row in () if per_image else (result["base"], *result["rows"]):
            del row["by_image"]
        return result


@dataclass(frozen=True)
class Variant:
    """One setting and its place in the study's tables: a group and a label, named as in the paper's data.

    slow: excluded by --quick.
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

    result_type: ClassVar[type[Result]] = StudyResult
    form: ClassVar[int] = 2

    def chosen(self, quick: bool) -> list[Variant]:
        return [each for each in self.variants if not (quick and each.slow)]

    def steps(self, task: Task) -> int:
        return len(task.subject.batches) * self._models(task.quick)

    def run(self, task: Task) -> StudyResult:
        """A setting that several variants or studies share is run once."""
        variants = self.chosen(task.quick)
        rows: dict[Setting, StudyRow] = {}
        for study in STUDIES:
            result = task.results.get(study.name)
            if isinstance(result, StudyResult):
                rows |= {each.setting: row for each, row in zip(study.chosen(task.quick), result.rows, strict=True)}
        settings = [_BASELINE, *dict.fromkeys(each.setting for each in variants)]
        missing = [setting for setting in settings if setting not in rows]  # the baseline always runs
        measured = evaluate(task.subject.model, task.batches(self._models(task.quick)), missing)
        rows |= {
            setting: StudyRow.of(row, scores)
            for setting, row, scores in zip(missing, measured.rows, measured.scores, strict=True)
        }
        return StudyResult(
            images=measured.images,
            base=rows[_BASELINE],
            rows=tuple(replace(rows[each.setting], group=each.group, label=each.label) for each in variants),
            capped=_capped(task.subject, settings),
        )

    def _models(self, quick: bool) -> int:
        return 1 + len({each.setting for each in self.chosen(quick)})


def _capped(subject: Subject, settings: Sequence[Setting]) -> tuple[CappedSetting, ...]:
    capped = []
    for each in settings:
        planned = plan(
            subject.model,
            r=each.r,
            method=each.method,
            image_size=subject.preprocessing.image_size,
            **dict(each.options),
        )
        blocks = [i for i, step in enumerate(planned.reductions, start=1) if step.num_reduced < step.num_requested]
        if blocks:
            capped.append(CappedSetting(each.method, each.r, tuple(blocks)))
    return tuple(dict.fromkeys(capped))


OFF_THE_SHELF = Study(
    "off_the_shelf",
    "Without training",
    "MCTF against ToMe over r, no weight trained.",
    ("Table 3",),
    tuple(
        variant(method, str(r), r=r, method=method, slow=r not in (8, R, 20))
        for method in ("mctf", "tome")
        for r in (1, 2, 4, 8, 12, R, 20)
    ),
)
CRITERIA = Study(
    "criteria",
    "Criteria",
    "MCTF with every subset of its criteria: similarity, informativeness, size.",
    ("Figure 7a",),
    tuple(
        variant(criteria, str(r), r=r, slow=r != R, **criteria_options(criteria))
        for criteria in SUBSETS
        for r in (CURVE if criteria in ("sim", "info", "sim+info", ALL) else (R,))
    ),
)
ONE_STEP_AHEAD = Study(
    "one_step_ahead",
    "One-step-ahead attention",
    "Informativeness from one-step-ahead attention against that of the previous block.",
    ("Figure 7b",),
    tuple(
        variant(attention, str(r), r=r, slow=r not in (8, R), attention=attention)
        for attention in ("one_step_ahead", "previous")
        for r in CURVE
    ),
)
DESIGN = Study(
    "design",
    "Design choices",
    f"Matching, pooling and attention of fused tokens, each changed alone, at r = {R}.",
    ("Table 4",),
    (  # the paper's lines under its own names, and variants that it does not have
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
    ),
)
TEMPERATURE = Study(
    "temperatures",
    "Temperatures",
    f"Each temperature changed alone, at r = {R}.",
    ("Table A",),
    tuple(
        variant(
            option,
            label,
            slow=label not in ("1", "1/100", default),
            **({} if label == default else {option: float(Fraction(label))}),  # type: ignore[arg-type]
        )
        for option, default in DEFAULTS.items()
        for label in TEMPERATURES
    ),
)
STUDIES = (OFF_THE_SHELF, CRITERIA, ONE_STEP_AHEAD, DESIGN, TEMPERATURE)
