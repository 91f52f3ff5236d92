"""The `mctf` command in forked processes: a server has imported everything, so that they start at once."""

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

_PRELOADED = ["mctf.cli.finetune", "mctf.cli.reproduce", "mctf.train.build", "mctf.reproduce.write", "mctf.models"]
_PRELOADED += ["mctf.cli.embed", "mctf.embedding.job", "mctf.embedding.ray_engine", "mctf.evaluation.environment"]
_PRELOADED += ["mctf.reproduce.analyses", "mctf.evaluation.setup", "matplotlib.figure", "jinja2", "tensorboard"]
TIMEOUT = 60  # seconds, on a loaded machine


class Forked:
    """One running command. log: a file with all it prints."""

    def __init__(
        self,
        arguments: list[object],
        *,
        log: Path,
        environment: dict[str, str] | None = None,
        largest: int | None = None,
    ) -> None:
        """largest: size of a file in bytes beyond which the system refuses to write."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.log = log
        words = list(map(str, arguments))
        self.process = context.Process(target=_run, args=(words, str(log), environment or {}, largest))
        self.process.start()

    def code(self) -> int:
        """The exit code, once the command ends."""
        self.process.join(TIMEOUT)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"no end after {TIMEOUT} s:\n{self.output()}")
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def send(self, number: signal.Signals) -> None:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, number)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, *, seconds: float = TIMEOUT, until: Callable[[], bool] = lambda: False) -> bool:
        """Whether the command still runs after so many seconds, or as soon as `until()`."""
        end = time.monotonic() + seconds
        while self.process.is_alive() and time.monotonic() < end and not until():
            time.sleep(0.002)
        return self.process.is_alive()


def _run(words: list[str], log: str, environment: dict[str, str], largest: int | None) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    sys.argv = ["mctf", *words]
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    import torch

    import mctf.cli

    torch.set_num_threads(1)
    mctf.cli.main()
