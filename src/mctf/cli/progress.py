"""A progress bar on stderr, by default only where stderr is a terminal."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .._utils import first_line
from ..errors import MctfError, is_out_of_memory

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..evaluation.setup import EvalRun, RunOptions
    from ..train.logging import Record

Item = TypeVar("Item")
StepSeen = Callable[[int, "Record | None"], None]  # called after each step, with its log record if there is one
_WINDOW = 300  # seconds over which the remaining time is estimated: some steps take a minute


class Command(click.Command):
    """A subcommand that imports PyTorch once its options are parsed, and says so where stderr is a terminal."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            os.getcwd()
        except OSError:
            raise MctfError("the working directory was removed: go to one that exists (cd)") from None
        with progress("loading PyTorch", wanted=ctx.params.get("progress")):
            try:
                import_module("torch")
                import_module("timm")
            except Exception as failure:
                if is_out_of_memory(failure):
                    raise
                raise MctfError(
                    f"PyTorch or timm cannot be loaded ({first_line(failure):.160}): check their installation and the "
                    "environment variables that they read"
                ) from failure
        return super().invoke(ctx)


class Bar:
    """Called after each step, or after several with their number. `describe` changes the text beside the bar."""

    def __init__(self, bar: "Progress | None" = None, task: Any = None) -> None:
        self._bar = bar
        self._task = task

    def __call__(self, steps: int = 1) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, steps)

    def describe(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=text)


@contextmanager
def progress(text: str, total: int | None = None, *, wanted: bool | None = None) -> Iterator[Bar]:
    """A bar of `total` steps, of which the yielded Bar counts those done.

    total: None for a bar that only shows activity. wanted: --progress or --no-progress; None for a bar on a terminal.
    """
    if not _has_bar(wanted):
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    what = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns: tuple[Any, ...] = (SpinnerColumn(), what, TimeElapsedColumn())
    if total is not None:
        columns = (
            SpinnerColumn(),
            what,
            BarColumn(20),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
    console = Console(stderr=True, force_terminal=wanted or None)
    with Progress(*columns, console=console, transient=True, speed_estimate_period=_WINDOW) as bar:
        yield Bar(bar, bar.add_task(text, total=total))


@contextmanager
def open_run(options: "RunOptions") -> "Iterator[EvalRun]":
    """`mctf.evaluation.setup.open_run` with a bar while it lists the images and loads the model."""
    from ..evaluation import setup

    with ExitStack() as stack:
        with progress(f"loading {options.model} and the names of images", wanted=options.progress):
            run = stack.enter_context(setup.open_run(options))
        yield run


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
    """Only rank 0 of torchrun shows a bar."""
    return (sys.stderr.isatty() if wanted is None else wanted) and os.environ.get("RANK", "0") == "0"


def _line_printer(total: int, *, done: int, lines: Callable[[str], None] | None) -> StepSeen:
    """Prints each log record with the remaining time at the speed of this run."""
    start = time.monotonic()

    def show(step: int, record: "Record | None") -> None:
        if lines is not None and record is not None:
            left = (time.monotonic() - start) / max(1, step - done) * (total - step)
            loss, speed = f"loss {record.total:.3f}", f"{record.images_per_second:,.0f} images/s"
            lines(f"step {step} of {total}: {loss}, {speed}, {timedelta(seconds=round(left))} left")

    return show
