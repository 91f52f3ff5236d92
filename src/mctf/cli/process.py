"""What a command does about its surroundings: signals, closed streams, readers that leave."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PATIENCE = 2.0  # seconds: one Ctrl-C may come as several signals, from the terminal and from torchrun


class Stopped(BaseException):
    """A signal that ends the command. Unlike KeyboardInterrupt, nobody catches it on the way."""


class ReaderGone(Exception):  # noqa: N818
    """Nobody reads the output any more, as in `mctf eval … | head -1`."""


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """Turns a broken pipe into ReaderGone: click and rich would exit with code 1."""
    try:
        yield
    except (BrokenPipeError, SystemExit) as stop:
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, BrokenPipeError):
            raise
        raise ReaderGone from None


@contextmanager
def stopped_by_signals(received: list[int]) -> Iterator[None]:
    """While open, signals that end a program raise Stopped, so that files and the terminal are left in order.

    `received` gets the number of the first one. Later ones end a program that does not end by itself. A signal that
    comes while the program is ending raises nothing. A signal that is ignored, as under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, patience, leaving = os.getpid(), 0.0, False

    def stop(number: int, _: object) -> None:
        nonlocal patience
        if os.getpid() != owner:  # a process that was forked
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not received:
            received.append(number)
            patience = time.monotonic() + _PATIENCE
            if not leaving:
                raise Stopped
        elif time.monotonic() > patience:
            os._exit(128 + number)

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    previous = {number: signal.getsignal(number) for number in numbers}
    previous = {number: handler for number, handler in previous.items() if handler not in (signal.SIG_IGN, None)}
    for number in previous:
        signal.signal(number, stop)
    try:
        yield
    finally:
        leaving = True
        for number, handler in previous.items():
            signal.signal(number, handler)


def open_closed_streams() -> None:
    """Open the null device in place of a standard stream that is closed, as by `>&-`: no file takes its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def discard(stream: Any) -> None:
    """Drop what could not be printed, so that Python does not try again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
