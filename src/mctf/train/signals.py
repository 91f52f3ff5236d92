"""Graceful termination: the first SIGTERM, SIGINT or SIGHUP requests a stop after the step, a later acts at once."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
_DEBOUNCE = 2.0  # seconds: torchrun forwards a Ctrl-C that the terminal has already sent to its processes


class StopRequest:
    """True once a signal was received. signal: its number."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


class StoppedError(Exception):
    """Training stopped on a signal, after saving. number: of the signal."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped after step {step} by signal {number}")
        self.number = number
        self.step = step


@contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """While open, signals are recorded in a StopRequest. Python allows signal handlers in the main thread only."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    previous = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}  # as under nohup
    ignored_until = 0.0

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal ignored_until
        if request.signal is None:
            request.signal, ignored_until = number, time.monotonic() + _DEBOUNCE
        elif time.monotonic() > ignored_until:
            signal.signal(number, previous[number])
            signal.raise_signal(number)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
