"""Runs that are killed, started twice or out of space: they resume to the same bits, and nothing is lost."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import timm
from safetensors.torch import save_file

from helpers.finetuning import arguments, assert_same, steps_logged
from helpers.forked import Forked
from helpers.images import write_folder
from helpers.torchrun import TIMEOUT, _free_port, write_stripes

pytestmark = pytest.mark.slow

KILLS = 20
Cases = Callable[[str, object], None]


class Place:
    """Images, and an uninterrupted run to compare with. seconds: that it took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = count()
        write_stripes(folder / "train", images=24, seed=0)
        self.whole = folder / "whole"
        assert self.start(self.whole).code() == 0  # also starts the server of forks
        shutil.rmtree(self.whole)
        start = time.monotonic()
        assert self.start(self.whole).code() == 0
        self.seconds = time.monotonic() - start

    def log(self) -> Path:
        return self.folder / f"output-{next(self.numbers)}.txt"

    def start(self, output: Path, *more: object, **how: Any) -> Forked:
        """`mctf finetune`, resumed if it began before."""
        return Forked(["finetune", *arguments(self.folder, output), "--resume", *more], log=self.log(), **how)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("chaos"))


def is_partial(output: Path) -> Callable[[], bool]:
    """Whether a checkpoint is being written."""
    folder = output / "checkpoints"
    return lambda: folder.is_dir() and any(name.endswith(".partial") for name in os.listdir(folder))


def killed_until_finished(
    start: Callable[[], Forked], draw: random.Random, *, seconds: float, until: Callable[[], bool], kills: int
) -> int:
    """Start, kill, start again, until a run ends by itself; the number of kills, at most `kills`.

    Every second kill comes as soon as `until()`, the others at random moments.
    """
    done = 0
    while True:
        run = start()
        aimed = done % 2 == 1
        if done < kills and run.wait(
            seconds=seconds if aimed else draw.uniform(0, 0.7 * seconds), until=until if aimed else bool
        ):
            run.kill()
            done += 1
            continue
        assert run.code() == 0, run.output()
        return done


def test_finetune_killed_at_any_moment_resumes_bit_for_bit(
    place: Place, tmp_path: Path, record_property: Cases
) -> None:
    draw = random.Random(0)
    kills = runs = 0
    while kills < KILLS:
        output = tmp_path / f"run{runs}"
        kills += killed_until_finished(
            lambda output=output: place.start(output),
            draw,
            seconds=place.seconds,
            until=is_partial(output),
            kills=KILLS - kills,
        )
        assert_same(output, place.whole)
        assert not [path for path in output.rglob("*") if path.name.startswith(".") or path.suffix == ".partial"]
        runs += 1
    print(f"finetune: {kills} kills, {kills} resumed, {runs} of {runs} runs equal")
    record_property("cases", ["chaos: finetune killed", kills])


def figures(report: Path) -> dict[str, Any]:
    """The content of report.json without times."""

    def without_times(value: dict[str, Any]) -> dict[str, Any]:
        times = ("seconds", "date", "Measured", "Command", "images_per_second")
        return {name: each for name, each in value.items() if name not in times}

    return json.loads((report / "report.json").read_text(), object_hook=without_times)


@pytest.mark.nightly
def test_reproduce_killed_at_any_moment_resumes_to_the_same_figures(
    place: Place, tmp_path: Path, record_property: Cases
) -> None:
    pictures = write_folder(tmp_path / "pictures", *(f"{name}/{index}.png" for name in "abc" for index in range(2)))
    save_file(timm.create_model("test_vit", num_classes=3).state_dict(), tmp_path / "tiny.safetensors")
    options = ["reproduce", "test_vit", "--data", pictures, "--weights", tmp_path / "tiny.safetensors"]
    options += ["--only", "class_token,largest_token,one_step_ahead", "--quick", "--device", "cpu", "--image-size", 64]
    begin = time.monotonic()
    assert Forked([*options, "--out", tmp_path / "whole"], log=place.log()).code() == 0
    seconds = time.monotonic() - begin
    draw = random.Random(1)
    kills = runs = 0
    while kills < 8:
        out = tmp_path / f"report{runs}"
        kills += killed_until_finished(
            lambda out=out: Forked([*options, "--out", out], log=place.log()),
            draw,
            seconds=seconds,
            until=(out / "results").is_dir,
            kills=min(4, 8 - kills),
        )
        assert figures(out) == figures(tmp_path / "whole")
        runs += 1
    print(f"reproduce: {kills} kills, {kills} resumed, {runs} of {runs} reports equal")
    record_property("cases", ["chaos: reproduce killed", kills])


def test_two_runs_in_one_folder(place: Place, tmp_path: Path, record_property: Cases) -> None:
    for number in range(2):
        output = tmp_path / f"run{number}"
        runs = [place.start(output), place.start(output, "--seed", 0)]
        codes = [run.code() for run in runs]
        assert sorted(codes) == [0, 2], [run.output() for run in runs]
        lines = runs[codes.index(2)].output().splitlines()
        holder = runs[codes.index(0)].process.pid
        assert lines == [f"mctf: process {holder} trains in {output} already: wait for it, or name another --output"]
        assert_same(output, place.whole)
    print("two at once: 2 pairs, 2 refused, 2 runs equal")
    record_property("cases", ["chaos: two at once", 2])


def test_sigterm_saves_and_resumes(place: Place, tmp_path: Path, record_property: Cases) -> None:
    draw, stopped = random.Random(2), 0
    for number in range(3):
        output = tmp_path / f"run{number}"
        run = place.start(output)
        step = draw.randrange(1, 25)
        run.wait(until=lambda output=output, step=step: steps_logged(output) >= step)
        run.send(signal.SIGTERM)
        code = run.code()
        assert code in (0, 128 + signal.SIGTERM), run.output()
        stopped += code != 0
        assert code == 0 or "all saved; to continue: mctf finetune --config" in run.output()
        assert place.start(output).code() == 0
        assert_same(output, place.whole)
    assert stopped >= 2
    print(f"SIGTERM: {stopped} stopped, {stopped} resumed, 3 of 3 runs equal")
    record_property("cases", ["chaos: SIGTERM", stopped])


@pytest.mark.parametrize("largest", [700, 3_000_000])
def test_files_refused_by_the_system(place: Place, tmp_path: Path, record_property: Cases, largest: int) -> None:
    run = place.start(tmp_path / "run", largest=largest)
    assert run.code() == 2, run.output()
    assert re.search(r"cannot be written \(File too large\).*: (make room|choose)", run.output().splitlines()[-1])
    left = [path for path in tmp_path.rglob("*") if path.suffix == ".partial" or path.name.startswith(".")]
    assert left == []
    assert place.start(tmp_path / "run").code() == 0
    assert_same(tmp_path / "run", place.whole)
    record_property("cases", ["chaos: full disk", 1])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MB, where one can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk(place: Place, small_disk: Path, record_property: Cases) -> None:
    run = place.start(small_disk / "run")
    assert run.code() == 2, run.output()
    line = run.output().splitlines()[-1]
    assert re.fullmatch(r"mctf: the checkpoint of step \d+ cannot be written \(No space left on device\), .*", line)
    names = sorted(path.name for path in (small_disk / "run" / "checkpoints").iterdir())
    assert names
    assert all(name.endswith(".pt") for name in names)
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    assert place.start(small_disk / "run").code() == 0
    assert_same(small_disk / "run", place.whole)
    record_property("cases", ["chaos: full disk", 1])


def ranks(place: Place, output: Path) -> list[Forked]:
    """Two processes of one group, without torchrun."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
    more = ("--batch", 8)
    return [
        place.start(output, *more, environment=group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)
    ]


@pytest.mark.nightly
def test_a_killed_rank_of_torchrun_ends_all_and_resumes(place: Place, tmp_path: Path, record_property: Cases) -> None:
    whole, output, log = tmp_path / "whole", tmp_path / "run", place.log()
    assert [rank.code() for rank in ranks(place, whole)] == [0, 0]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mctf"]
    command = [*launcher, "finetune", *arguments(place.folder, output, batch=8)]
    with log.open("wb") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        torchrun = subprocess.Popen([str(word) for word in command], stdout=file, stderr=file, env=environment)
    end = time.monotonic() + TIMEOUT
    while steps_logged(output) < 7:
        assert torchrun.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.005)
    os.kill(rank_of(torchrun.pid, 1), signal.SIGKILL)
    assert torchrun.wait(30) != 0
    assert "mctf/cli" not in log.read_text()  # no traceback of ours
    again = ranks(place, output)
    assert [rank.code() for rank in again] == [0, 0], [rank.output() for rank in again]
    assert_same(output, whole)
    print("torchrun: 1 rank killed, 1 resumed, 1 of 1 runs equal")
    record_property("cases", ["chaos: rank killed", 1])


def rank_of(parent: int, rank: int) -> int:
    """The process id of a rank that torchrun started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"rank {rank} is not among {children}")


def test_a_second_group_in_the_same_folder_is_refused_on_every_rank(
    place: Place, tmp_path: Path, record_property: Cases
) -> None:
    first = place.start(tmp_path / "run")
    assert first.wait(until=(tmp_path / "run" / ".mctf.lock").exists)
    second = ranks(place, tmp_path / "run")
    assert [rank.code() for rank in second] == [2, 2], [rank.output() for rank in second]
    for rank in second:
        assert f"process {first.process.pid} trains in" in rank.output().splitlines()[-1]
    assert first.code() == 0
    assert_same(tmp_path / "run", place.whole)
    record_property("cases", ["chaos: two at once", 1])
