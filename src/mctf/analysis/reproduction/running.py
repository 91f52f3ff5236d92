"""Experiments one after the other, each kept as soon as it is done; what was done before is not repeated."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from ...errors import MctfError
from .experiment import Experiment, Subject, Task
from .records import Record, Records


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
