"""What an experiment is: it measures one thing the paper reports and gives numbers that JSON can hold.

Axes: B images, 3 H W.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from ..data import Batch, EvalLoader, Preprocessing
from ..errors import MctfError
from .records import Record, Records

Advance = Callable[[int], None]  # so many more steps are done
Result = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """What is measured: an unfused model in evaluation mode, and images for it. name: the model's."""

    name: str
    model: nn.Module
    batches: EvalLoader
    preprocessing: Preprocessing

    def __len__(self) -> int:
        return len(self.batches.dataset)

    def some(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """Names and inputs (3 H W) of at most `count` images, evenly spaced over all of them."""
        images = self.batches.dataset.spaced(count)
        for index, name in enumerate(images.names):
            yield name, self.batches.transform(images.read(index))

    def to_model(self, pixels: Tensor) -> Tensor:
        """Pixels where the model is and in its dtype."""
        weight = next(self.model.parameters())
        return pixels.to(weight.device, weight.dtype)


@dataclass(frozen=True)
class Task:
    """What an experiment is given when it runs.

    subject: None for an experiment that needs no images. quick: measure fewer settings. pictures: a folder for
    pictures. advance: to be told of every step. results: of other experiments on the same subject, by name; what they
    have measured need not be measured again.
    """

    subject: Subject | None
    quick: bool
    pictures: Path
    advance: Advance = lambda _: None
    results: Mapping[str, Result] = field(default_factory=dict)

    @property
    def seen(self) -> Subject:
        """The subject of an experiment that needs one."""
        assert self.subject is not None
        return self.subject

    def batches(self, weight: int) -> Iterator[Batch]:
        """All batches; each counts as `weight` steps."""
        for batch in self.seen.batches:
            yield batch
            self.advance(weight)


class Experiment(ABC):
    """Implementations are frozen dataclasses.

    name: of its file and for the command line. measures: one sentence. sources: the tables and figures of the paper,
    as in "Table 1". needs_images: whether it needs a subject. form: of its result, counted up when that changes, so
    that a file with less in it is never taken for a whole one.
    """

    name: str
    title: str
    measures: str
    sources: tuple[str, ...]
    needs_images: bool = True
    form: ClassVar[int] = 1

    @abstractmethod
    def steps(self, task: Task) -> int:
        """How many steps it will report, a step being about one batch through one model."""

    @abstractmethod
    def run(self, task: Task) -> Result:
        """Measure. Everything in the result is a number, a text, a list, a dictionary by text, or None."""

    def unsuited(self, subject: Subject) -> str | None:
        """Why it cannot be run on this subject; None where it can."""
        return None


# MERGED from mctf.reproduce.runner:
# Experiments one after the other, each kept as soon as it is done; what was done before is not repeated.


@dataclass(frozen=True)
class Work:
    """What a run has to do. known: done before. todo: to be measured. left_out: why others are not, by name.

    again: whether all of it is to be measured, even what a known experiment has measured as well.
    """

    known: dict[str, Record]
    todo: tuple[Experiment, ...]
    left_out: dict[str, str]
    again: bool = False


def choose(
    experiments: Sequence[Experiment], *, names: Sequence[str] = (), tables: Sequence[str] = ()
) -> tuple[Experiment, ...]:
    """The experiments of these names and of these tables of the paper, in order; all where nothing is named."""
    if not names and not tables:
        return tuple(experiments)
    known = [each.name for each in experiments]
    for name in names:
        if name not in known:
            raise MctfError(f"there is no experiment {name!r}: choose from {', '.join(known)}")
    numbered = [source for each in experiments for source in each.sources if source.startswith("Table ")]
    asked = {f"Table {table}" for table in tables}
    for table in asked - set(numbered):
        raise MctfError(f"nothing is measured for {table}: choose from {', '.join(sorted(numbered))}")
    return tuple(each for each in experiments if each.name in names or asked & set(each.sources))


def arrange(
    experiments: Sequence[Experiment],
    wanted: Sequence[Experiment],
    records: Records,
    *,
    subject: Subject | None,
    again: bool,
) -> Work:
    """Sort out what to measure of what is wanted; of the other experiments, what was found before is taken along.

    again: measure what is wanted anew, and leave out what was measured under other conditions.
    """
    if not again:
        records.check(experiments)
    kept = [each for each in experiments if not (again and each in wanted)]
    known = {each.name: record for each in kept if (record := records.fitting(each)) is not None}
    reasons = {each.name: _obstacle(each, subject) for each in wanted if each.name not in known}
    return Work(
        known,
        tuple(each for each in wanted if each.name in reasons and reasons[each.name] is None),
        {name: reason for name, reason in reasons.items() if reason is not None},
        again,
    )


def _obstacle(experiment: Experiment, subject: Subject | None) -> str | None:
    if not experiment.needs_images:
        return None
    return "it needs a model and images (MODEL and --data)" if subject is None else experiment.unsuited(subject)


def measure(
    work: Work, records: Records, task: Task, *, after: Callable[[Record], object] = lambda _: None
) -> dict[str, Record]:
    """Run what is to be done and give all records by name; `after` is called with every record that is made."""
    found = dict(work.known)
    results = {} if work.again else {name: record.result for name, record in found.items()}
    for experiment in work.todo:
        start = time.perf_counter()
        result = experiment.run(replace(task, results=results))
        results = {**results, experiment.name: result}
        seconds = time.perf_counter() - start
        date = datetime.now(UTC).isoformat(timespec="seconds")
        record = Record(experiment.name, dict(records.of(experiment)), seconds, date, result, experiment.form)
        records.keep(record, experiment)
        found[experiment.name] = record
        after(record)
    return found
