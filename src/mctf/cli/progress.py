"""A progress bar on stderr, by default only where stderr is a terminal."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ..train.logging import Record

Item = TypeVar("Item")
StepSeen = Callable[[int, "Record | None"], None]  # called after each step, with its log record if there is one
_WINDOW = 300  # seconds over which the remaining time is estimated: some steps take a minute


@contextmanager
def progress(text: str, total: int | None = None, *, wanted: bool | None = None) -> Iterator[Callable[..., None]]:
    """Yields a function to call after each of `total` steps, or after several with their number.

    total: None for a bar that only shows activity. wanted: --progress or --no-progress; None for a bar on a terminal.
    """
    if not _has_bar(wanted):
        yield lambda _=1: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, force_terminal=wanted or None)
    with Progress(console=console, transient=True, speed_estimate_period=_WINDOW) as bar:
        task = bar.add_task(text, total=total)
        yield lambda steps=1: bar.advance(task, steps)


def ticking(items: Iterable[Item], tick: Callable[[], None]) -> Iterator[Item]:
    """The same items; `tick` is called after each was processed."""
    for item in items:
        yield item
        tick()


@contextmanager
def steps_bar(
    total: int,
    *,
    done: int,
    images: int,
    wanted: bool | None = None,
    lines: Callable[[str], None] | None = None,
) -> Iterator[StepSeen]:
    """Yields a function to call after each training step, with its log record if there is one.

    done: steps before this run. images: per step, for images/s. lines: prints log records where there is no bar.
    """
    if not _has_bar(wanted):
        yield _line_printer(total, done=done, lines=lines)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True, force_terminal=wanted or None), transient=True) as bar:
        task = bar.add_task("", total=total, completed=done, speed="")

        def advance(step: int, record: "Record | None") -> None:
            speed = bar.tasks[0].speed
            bar.update(task, completed=step, speed="" if speed is None else f"{speed * images:,.0f} images/s")
            if record is not None:
                bar.update(task, description=f"loss {record.total:.3f}")

        yield advance


def _has_bar(wanted: bool | None) -> bool:
    return sys.stderr.isatty() if wanted is None else wanted


def _line_printer(total: int, *, done: int, lines: Callable[[str], None] | None) -> StepSeen:
    """Prints each log record with the remaining time at the speed of this run."""
    start = time.monotonic()

    def show(step: int, record: "Record | None") -> None:
        if lines is not None and record is not None:
            left = (time.monotonic() - start) / max(1, step - done) * (total - step)
            loss, speed = f"loss {record.total:.3f}", f"{record.images_per_second:,.0f} images/s"
            lines(f"step {step} of {total}: {loss}, {speed}, {timedelta(seconds=round(left))} left")

    return show
