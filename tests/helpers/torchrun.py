"""The `mctf` command in subprocesses: one process, several ranks of one group, or under torchrun."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

TIMEOUT = 120  # seconds, on a loaded machine


def write_stripes(folder: Path, *, images: int, seed: int) -> Path:
    """One class folder per direction, four in all, with `images` pictures of stripes each."""
    y, x = np.mgrid[:32, :32]
    for label in range(4):
        place = folder / f"direction{label}"
        place.mkdir(parents=True)
        angle = label * np.pi / 4
        for index in range(images):
            random = np.random.default_rng([seed, label, index])
            wave = np.sin(0.8 * (x * np.cos(angle) + y * np.sin(angle)) + random.uniform(0, 6))
            pixels = 128 + 90 * wave[..., None] * random.uniform(0.6, 1, 3) + random.normal(0, 15, (32, 32, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{index}.png")
    return folder


class Running:
    """One `mctf` command in one or several processes, with one output file for all of them."""

    def __init__(self, arguments: list[object], *, world: int = 1, folder: Path) -> None:
        self.log = folder / f"output-{time.monotonic_ns()}.txt"
        command = [sys.executable, "-m", "mctf", *map(str, arguments)]
        port = _free_port()
        self.processes = [self._start(command, rank=rank, world=world, port=port) for rank in range(world)]

    def _start(self, command: list[str], *, rank: int, world: int, port: int) -> "subprocess.Popen[bytes]":
        settings = {"OMP_NUM_THREADS": "1"}
        if world > 1:
            settings |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            settings |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        with self.log.open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | settings)

    def codes(self) -> list[int]:
        return [process.wait(TIMEOUT) for process in self.processes]

    def output(self) -> str:
        return self.log.read_text()

    def send(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Poll until `reached()`; fails if the command ends before."""
        deadline = time.monotonic() + TIMEOUT
        while not reached():
            ended = [process.poll() for process in self.processes if process.poll() is not None]
            assert not ended, f"ended with {ended} before:\n{self.output()}"
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.005)


def run_together(arguments: list[object], *, world: int, folder: Path) -> str:
    """The output of a command that must succeed in all processes."""
    running = Running(arguments, world=world, folder=folder)
    assert running.codes() == [0] * world, running.output()
    return running.output()


def run_torchrun(arguments: list[object], *, world: int) -> "subprocess.CompletedProcess[str]":
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [*launcher, "-m", "mctf", *map(str, arguments)]
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=settings, timeout=TIMEOUT, check=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
