"""Stopping in good order: the first SIGTERM or SIGINT asks, a later one acts at once."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ECHO = 2.0  # seconds: torchrun passes a Ctrl-C on that the terminal has sent to its processes already


class Interruption:
    """Which signal asked for an end; None while nobody did."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """While open, signals are noted rather than obeyed. Python sets handlers in the main thread only."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    deaf_until = 0.0

    def note(number: int, _: FrameType | None) -> None:
        nonlocal deaf_until
        if interruption.signal is None:
            interruption.signal, deaf_until = number, time.monotonic() + _ECHO
        elif time.monotonic() > deaf_until:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    for number in _SIGNALS:
        signal.signal(number, note)
    try:
        yield interruption
    finally:
        for number in _SIGNALS:
            signal.signal(number, before[number])


class StoppedError(Exception):
    """Training was asked to stop, and did after saving. number: of the signal."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped after step {step} by signal {number}")
        self.number = number
        self.step = step
