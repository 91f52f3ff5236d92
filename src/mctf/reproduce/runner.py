"""Experiments, one for each table or figure of the paper, and the loop that runs and resumes them.

Axes: B images, 3 H W.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..data import Batch, EvalLoader, Preprocessing
from ..errors import MctfError, one_line
from ..evaluation.fidelity import run_model
from .records import Record, Records, Result

_TRIED = 32  # images that are read before anything is measured


@dataclass(frozen=True)
class Subject:
    """What is measured: an unfused model in evaluation mode, and images for it. name: the model's."""

    name: str
    model: nn.Module
    batches: EvalLoader
    preprocessing: Preprocessing

    def __len__(self) -> int:
        return len(self.batches.dataset)

    def sample(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """Names and inputs (3 H W) of at most `count` images, evenly spaced over all of them.

        Unreadable ones are omitted, or raise MctfError, as in the batches.
        """
        images = self.batches.dataset.spaced(count)
        names = images.names
        for index, image in images.readable(skip=self.batches.skips):
            yield one_line(names[index]), self.batches.transform(image)

    def to_model(self, pixels: Tensor) -> Tensor:
        """Pixels on the model's device and in its dtype."""
        weight = next(self.model.parameters())
        return pixels.to(weight.device, weight.dtype)


@dataclass(frozen=True)
class Task:
    """The input of an experiment.

    optional_subject: None for experiments without images. quick: measure fewer settings. pictures: the folder for
    pictures. advance: called with the number of steps done. results: of other experiments on the same subject, by
    name; their measurements can be reused.
    """

    optional_subject: Subject | None
    quick: bool
    pictures: Path
    advance: Callable[[int], None] = lambda _: None
    results: Mapping[str, Result] = field(default_factory=dict)

    @property
    def subject(self) -> Subject:
        """The subject of an experiment that needs one."""
        assert self.optional_subject is not None
        return self.optional_subject

    def batches(self, weight: int) -> Iterator[Batch]:
        """All batches; each counts as `weight` steps."""
        for batch in self.subject.batches:
            yield batch
            self.advance(weight)


@torch.inference_mode()
def check_subject(subject: Subject) -> None:
    """Raise MctfError where images cannot be read, or the model gives undefined numbers; some images are tried."""
    inputs = [pixels for _, pixels in subject.sample(_TRIED)]
    logits = run_model(subject.model, subject.to_model(torch.stack(inputs[:4]))).logits
    if not logits.isfinite().all():
        raise MctfError(f"{subject.name} gives infinite or undefined numbers for these images: give other weights")


class Experiment(ABC):
    """One measurement that the paper reports. Implementations are stateless.

    name: of its file and for the command line. measures: one sentence. sources: the tables and figures of the paper,
    as in "Table 1". needs_images: whether it needs a subject. result_type: what `run` returns. form: the version of
    the result's layout, increased when it changes, so that an older file is never read as a complete one.
    """

    name: str
    title: str
    measures: str
    sources: tuple[str, ...]
    needs_images: bool = True
    result_type: ClassVar[type[Result]]
    form: ClassVar[int] = 1

    @abstractmethod
    def steps(self, task: Task) -> int:
        """Number of steps it reports; a step is about one batch through one model."""

    @abstractmethod
    def run(self, task: Task) -> Result: ...

    def unsupported(self, subject: Subject) -> str | None:
        """Why it cannot run on this subject; None where it can."""
        return None


@cache
def experiments() -> tuple[Experiment, ...]:
    """All experiments, in the order of the report."""
    from . import analyses, costs, pictures, studies

    return (
        costs.TABLE_1,
        costs.TABLE_2,
        costs.CostsByR(),
        *studies.STUDIES,
        analyses.ClassToken(),
        analyses.LargestToken(),
        pictures.AttentionMaps(),
        pictures.FusedPatches(),
    )


def choose(
    available: Sequence[Experiment], *, names: Sequence[str] = (), tables: Sequence[str] = ()
) -> tuple[Experiment, ...]:
    """The experiments with these names and for these tables of the paper, in order; all where neither is given."""
    if not names and not tables:
        return tuple(available)
    choices = [each.name for each in available]
    for name in names:
        if name not in choices:
            raise MctfError(f"there is no experiment {name!r}: choose from {', '.join(choices)}")
    measured = {source for each in available for source in each.sources if source.startswith("Table ")}
    requested = {f"Table {table}" for table in tables}
    for table in sorted(requested - measured):
        raise MctfError(f"no experiment measures {table}: choose from {', '.join(sorted(measured))}")
    return tuple(each for each in available if each.name in names or requested & set(each.sources))


@dataclass(frozen=True)
class Work:
    """The work of one run. finished: records of earlier runs. pending: to be measured. skipped: reasons by name.

    again: whether pending experiments measure everything anew instead of reusing results of finished ones.
    """

    finished: dict[str, Record]
    pending: tuple[Experiment, ...]
    skipped: dict[str, str]
    again: bool = False


def arrange(
    available: Sequence[Experiment],
    requested: Sequence[Experiment],
    records: Records,
    *,
    subject: Subject | None,
    again: bool,
) -> Work:
    """Divide the requested experiments into finished, pending and skipped; records of the others are included.

    again: measure requested experiments anew, and ignore records of other conditions.
    """
    if not again:
        records.check(available)
    reusable = [each for each in available if not (again and each in requested)]
    finished = {each.name: record for each in reusable if (record := records.load(each)) is not None}
    pending, skipped = [], {}
    for each in requested:
        if each.name in finished:
            continue
        reason = None
        if each.needs_images:
            missing = "it needs a model and images (MODEL and --data)"
            reason = missing if subject is None else each.unsupported(subject)
        if reason is None:
            pending.append(each)
        else:
            skipped[each.name] = reason
    return Work(finished, tuple(pending), skipped, again)


def measure(
    work: Work, records: Records, task: Task, *, after: Callable[[Record], object] = lambda _: None
) -> dict[str, Record]:
    """Run the pending experiments and return all records by name.

    Each record is saved as soon as its experiment ends; `after` is then called with it.
    """
    finished = dict(work.finished)
    results = {} if work.again else {name: record.result for name, record in finished.items()}
    for experiment in work.pending:
        start = time.perf_counter()
        result = experiment.run(replace(task, results=results))
        results = {**results, experiment.name: result}
        seconds = time.perf_counter() - start
        date = datetime.now(UTC).isoformat(timespec="seconds")
        record = Record(experiment.name, dict(records.of(experiment)), seconds, date, result, experiment.form)
        records.save(record, experiment)
        finished[experiment.name] = record
        after(record)
    return finished
