"""A progress bar on stderr, where that is a terminal or the user wants one; elsewhere nothing."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


@contextmanager
def progress(text: str, total: int | None = None, *, wanted: bool | None = None) -> Iterator[Callable[[], None]]:
    """Gives a function to call after each of `total` steps; without a total the bar only shows that it lives.

    wanted: what the user said about bars; without a word there is one where stderr is a terminal.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True, force_terminal=wanted or None), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)


def ticking(items: Iterable[Item], tick: Callable[[], None]) -> Iterator[Item]:
    """The same items; `tick` is called when each is done with."""
    for item in items:
        yield item
        tick()
