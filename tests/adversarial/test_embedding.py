"""`mctf embed` killed at any moment, on one machine and on a Ray cluster: every image once, and the same bits.

`MCTF_CHAOS=full` takes 2,000 photographs and 20 kills instead of the small generated ones.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from helpers.forked import Forked
from helpers.images import encode, make_picture
from helpers.shared_data import SHARED

pytestmark = pytest.mark.slow

FULL = os.environ.get("MCTF_CHAOS") == "full"
IMAGES, KILLS, SHARD = (2000, 20, 40) if FULL else (300, 3, 30)
MODEL = ["embedded"] if FULL else ["test_vit", "--random-weights", "--image-size", 32]
READ = """
import json, sys
from pathlib import Path
import pyarrow.parquet as pq
tables = [pq.read_table(path) for path in sorted(Path(sys.argv[1]).glob("*.parquet"))]
keys = [key for table in tables for key in table["key"].to_pylist()]
print(json.dumps([len(keys), len(set(keys)), str(tables[0].schema.field("embedding").type)]))
"""


class Place:
    """Images in a zip file, and an uninterrupted run. seconds: that one shard took."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, count()
        self.images = folder / "images.zip"
        with zipfile.ZipFile(self.images, "w", zipfile.ZIP_STORED) as archive:
            if FULL:
                photographs = zipfile.ZipFile(SHARED / "data/tiny-imagenet-val.zip")
                names = [name for name in photographs.namelist() if name.endswith(".webp")]
                for name in names[:IMAGES]:
                    archive.writestr(name, photographs.read(name))
            else:
                for seed in range(IMAGES):
                    archive.writestr(f"{seed % 7}/{seed}.png", encode(make_picture(seed)))
        self.whole = folder / "whole"
        self.finish(self.whole)
        stats = [json.loads(path.read_text()) for path in self.whole.glob("*_stats.json")]
        self.seconds = sum(each["seconds"] for each in stats) / len(stats)
        self.expected = contents(self.whole)

    def arguments(self, output: Path, *more: object) -> list[object]:
        options = ["--batch-size", 16, "--shard-size", SHARD, "--device", "cpu"]
        return ["embed", *MODEL, "--data", self.images, "--output", output, *options, *more]

    def start(self, output: Path, *more: object, **how: int) -> Forked:
        log = self.folder / f"output-{next(self.numbers)}.txt"
        return Forked(self.arguments(output, *more), log=log, **how)

    def finish(self, output: Path, *more: object) -> None:
        run = self.start(output, *more)
        run.process.join(900)
        assert run.process.exitcode == 0, run.output()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    if FULL and not (SHARED / "data/tiny-imagenet-val.zip").exists():
        pytest.skip("../shared/data/tiny-imagenet-val.zip is absent")
    return Place(tmp_path_factory.mktemp("embedding"))


def contents(output: Path) -> dict[str, bytes]:
    """All vectors, as the bytes of their files; nothing hidden is left beside them."""
    assert [path.name for path in output.iterdir() if path.name.startswith(".")] == []
    return {path.name: path.read_bytes() for path in output.glob("*.parquet")}


def assert_whole(output: Path, place: Place) -> None:
    found = contents(output)
    assert found.keys() == place.expected.keys()
    assert [name for name in found if found[name] != place.expected[name]] == []
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["counts"] == {"shards_finished": -(-IMAGES // SHARD), "images": IMAGES, "failed": 0}


def test_every_key_is_there_once(place: Place) -> None:
    printed = subprocess.run([sys.executable, "-c", READ, str(place.whole)], capture_output=True, check=True).stdout
    rows, keys, kind = json.loads(printed)
    assert rows == keys == IMAGES
    assert kind.startswith("fixed_size_list<")


def is_committing(output: Path) -> Callable[[], bool]:
    """Whether the files of a shard are being renamed."""
    return lambda: any(path.parent.name.startswith(".0") for path in output.glob(".0*/stats"))


def test_killed_at_any_moment_resumes_bit_for_bit(
    place: Place, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    draw, output, kills, finished = random.Random(0), tmp_path / "run", 0, {}
    while kills < KILLS:
        done = len(list(output.glob("*_stats.json")))
        run = place.start(output)
        if kills % 5 == 4:  # while it starts
            alive = run.wait(seconds=draw.uniform(0, 0.5))
        elif kills % 5 == 1:
            alive = run.wait(until=is_committing(output))
        else:
            goal = done + draw.randrange(2)
            alive = run.wait(until=lambda goal=goal, output=output: len(list(output.glob("*_stats.json"))) >= goal)
            alive = alive and run.wait(seconds=draw.uniform(0, place.seconds))
        if not alive:  # it was faster: the next kills are of another run
            run.process.join(900)
            assert run.process.exitcode == 0, run.output()
            assert_whole(output, place)
            output, finished = tmp_path / f"run after {run.process.pid}", {}
            continue
        run.kill()
        kills += 1
        finished = {path.name: path.stat().st_mtime_ns for path in output.glob("*_stats.json")}
        print(f"kill {kills}: {len(finished)} shards finished")
    place.finish(output)
    assert all((output / name).stat().st_mtime_ns == moment for name, moment in finished.items())
    assert_whole(output, place)
    record_property("cases", ["chaos: embed killed", kills])


def test_parts_at_once_and_a_second_run_of_one_part(
    place: Place, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    output = tmp_path / "run"
    runs = [place.start(output, "--shard", f"{part}/2") for part in (1, 2)]
    assert runs[0].wait(until=lambda: any(output.glob(".00*/rows")))
    again = place.start(output, "--shard", "1/2")
    again.process.join(900)
    assert again.process.exitcode in (0, 2), again.output()  # 0 where the first run was faster
    if again.process.exitcode == 2:
        assert "already: wait for it, or name another --output" in again.output()
        assert len(again.output().splitlines()) == 1
    for run in runs:
        run.process.join(900)
        assert run.process.exitcode == 0, run.output()
    assert_whole(output, place)
    record_property("cases", ["chaos: two at once", 1])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 kB, where one can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk(place: Place, small_disk: Path, record_property: Callable[[str, object], None]) -> None:
    output = small_disk / "run"
    run = place.start(output)
    run.process.join(900)
    assert run.process.exitcode == 2, run.output()
    line = run.output().splitlines()
    assert len(line) == 1
    assert "No space left on device" in line[0]
    assert "finished shards are whole" in line[0]
    assert contents(output).items() <= place.expected.items()
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    place.finish(output)
    assert_whole(output, place)
    record_property("cases", ["chaos: full disk", 1])


def test_files_refused_by_the_system(
    place: Place, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    run = place.start(tmp_path / "run", largest=4000)
    run.process.join(900)
    assert run.process.exitcode == 2, run.output()
    assert "File too large" in run.output()
    place.finish(tmp_path / "run")
    assert_whole(tmp_path / "run", place)
    record_property("cases", ["chaos: full disk", 1])


@pytest.mark.nightly
@pytest.mark.slow
def test_a_killed_worker_of_ray(place: Place, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    output, log = tmp_path / "run", tmp_path / "log"
    words = place.arguments(output, "--engine", "ray", "--actors", 2 if FULL else 1)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        command = [sys.executable, "-m", "mctf", *map(str, words)]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    killed: set[int] = set()
    try:
        for wanted in range(3 if FULL else 1):
            end = time.monotonic() + 900
            while len(list(output.glob("*_stats.json"))) <= 3 * wanted or not workers_of(process.pid) - killed:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.01)
            victim = sorted(workers_of(process.pid) - killed)[0]
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
        assert process.wait(900) == 0, log.read_text()
    finally:
        process.kill()
    assert_whole(output, place)
    record_property("cases", ["chaos: Ray worker killed", len(killed)])


def workers_of(ancestor: int) -> set[int]:
    """Process ids of the Ray actors below a process that embed at the moment or wait for a shard."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, rest = path.read_text().rpartition(")")
            number = int(path.parent.name)
            parents[number] = int(rest.split()[1])
            names[number] = (path.parent / "cmdline").read_text()
        except (OSError, ValueError):
            continue
    below, grown = {ancestor}, True
    while grown:
        more = {number for number, parent in parents.items() if parent in below} - below
        grown = bool(more)
        below |= more
    return {number for number in below if names.get(number, "").startswith("ray::_Worker")}
