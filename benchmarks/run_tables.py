"""All GPU tables of docs/performance.md: `python benchmarks/run_tables.py FOLDER [NAME …]`.

torch.compile takes minutes per table and uses the CPU; measuring takes seconds and needs the whole GPU. Every table is
therefore a process: all compile in parallel, wait for each other, and then measure one after the other. A table that
is still compiling after PATIENCE seconds is stopped, as it would disturb the others. A signal that stops this program
stops its tables.

FOLDER gets one JSON file and one text file per table; NAMEs select tables. All tables are in bfloat16, so each has
both baselines, with the patch embedding as a convolution and as a matrix product, and speed-ups over both.
"""

import argparse
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

COMMON = "--dtype bfloat16 --compile --rounds 5"
DEIT_TINY = "deit_tiny_patch16_224 -m ward,mctf_exact,mctf,tome --batch 256 --mode reduce-overhead --no-bounds"
TABLES = {
    "h200_vit_large_r8": "vit_large_patch16_224 -r 8 -m mctf_exact --batch 128",
    "h200_deit_tiny_r16": "deit_tiny_patch16_224 -r 16 -m mctf_exact --batch 256",
    "h200_deit_tiny_r16_graphs": "deit_tiny_patch16_224 -r 16 -m mctf_exact --batch 256 --mode reduce-overhead",
    "h200_deit_small_r16": "deit_small_patch16_224 -r 16 -m mctf_exact,mctf,tome --batch 256",
    "h200_deit_base_r16": "deit_base_patch16_224 -r 16 -m mctf_exact,mctf,tome --batch 256",
    "h200_deit_small_fast": "deit_small_patch16_224 -r fast -m mctf_exact,mctf --batch 256",
    "h200_deit_base_fast": "deit_base_patch16_224 -r fast -m mctf_exact --batch 256",
    "h200_deit_small_training": "deit_small_patch16_224 -r 16 -m mctf_exact,mctf --batch 256 --training",
    "h200_deit_small_training_graphs": (
        "deit_small_patch16_224 -r 16 -m mctf_exact,mctf --batch 256 --training --mode reduce-overhead"
    ),
    "h200_deit_base_384_fast_batch64": "deit_base_patch16_384 -r fast -m mctf_exact --batch 64",
    "h200_deit_base_384_fast_batch1": "deit_base_patch16_384 -r fast -m mctf_exact --batch 1 --mode reduce-overhead",
    "h200_deit_small_fast_batch1": "deit_small_patch16_224 -r fast -m mctf_exact --batch 1 --mode reduce-overhead",
    "h200_deit_small_fast_batch8": "deit_small_patch16_224 -r fast -m mctf_exact --batch 8 --mode reduce-overhead",
    "h200_deit_small_fast_batch64": "deit_small_patch16_224 -r fast -m mctf_exact --batch 64 --mode reduce-overhead",
    "h200_vit_small_1024_batch4": "vit_small_patch16_224 --image-size 1024 -r 0.1 -m mctf_exact --batch 4",
    "h200_vit_small_1024_fast_batch4": "vit_small_patch16_224 --image-size 1024 -r fast -m mctf_exact --batch 4",
    "h200_deit_small_ward": "deit_small_patch16_224 --flops 0.56 -m ward,mctf_exact --batch 256",
    "h200_deit_small_ward_every_second": ("deit_small_patch16_224 --flops 0.56 --blocks 3,5,7,9 -m ward --batch 256"),
    "h200_deit_base_ward": "deit_base_patch16_224 --flops 0.56 -m ward,mctf_exact --batch 256",
    "h200_deit_small_trimmed": "deit_small_patch16_224 -r 0 --trim-last -m ward --batch 256",
    "h200_vit_small_1024_ward_batch4": "vit_small_patch16_224 --image-size 1024 --flops 0.56 -m ward --batch 4",
    "h200_vit_small_1024_ward_batch4_graphs": (
        "vit_small_patch16_224 --image-size 1024 --flops 0.56 -m ward --batch 4 --mode reduce-overhead"
    ),
    "h200_deit_tiny_ward_48_graphs": f"{DEIT_TINY} --flops 0.48",
    "h200_deit_tiny_ward_56_graphs": f"{DEIT_TINY} --flops 0.56",
    "h200_deit_tiny_ward_78_graphs": f"{DEIT_TINY} --flops 0.78",
    "h200_deit_base_fp8": "deit_base_patch16_224 --flops 0.56 -m ward --batch 128 --precision bf16,fp8",
    "h200_vit_large_fp8": "vit_large_patch16_224 --flops 0.56 -m ward --batch 128 --precision bf16,fp8",
    "h200_vit_huge_fp8": "vit_huge_patch14_224 --flops 0.56 -m ward --batch 128 --precision bf16,fp8 --no-bounds",
}
PATIENCE = 420  # seconds for all tables to compile
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GATE, TABLE = "MCTF_TABLES_GATE", "MCTF_TABLES_TABLE"


def measure_one_at_a_time() -> None:
    """Make `mctf bench` in this process wait, compiled and warm, for exclusive use of the machine."""
    from mctf.evaluation import benchmark

    repeats, parent = benchmark._repeats, os.getppid()

    def wait_and_repeat(timing: object) -> int:
        gate = Path(os.environ[GATE])
        (gate / os.environ[TABLE]).touch()
        while not (gate / "open").exists():
            if os.getppid() != parent:
                sys.exit("the program that started this table has ended")
            time.sleep(0.5)
        wait_and_repeat.lock = (gate / "lock").open("w")  # held until the process ends
        fcntl.flock(wait_and_repeat.lock, fcntl.LOCK_EX)
        return repeats(timing)

    benchmark._repeats = wait_and_repeat


def start(name: str, folder: Path, gate: Path) -> subprocess.Popen:
    words = shlex.split(f"bench {TABLES[name]} {COMMON} --output {shlex.quote(str(folder / name))}.json")
    environment = os.environ | {GATE: str(gate), TABLE: name, "TORCHINDUCTOR_COMPILE_THREADS": "6"}
    (folder / f"{name}.json").unlink(missing_ok=True)  # of an earlier run
    with (folder / f"{name}.txt").open("w") as text:
        return subprocess.Popen(
            [sys.executable, __file__, "--", *words],
            env=environment,
            stdout=text,
            stderr=text,
            start_new_session=True,  # with its compilers, so that all can be stopped together
        )


def open_when_ready(running: dict[str, subprocess.Popen], gate: Path, deadline: float) -> None:
    """Let the tables measure once all are compiled, or at the deadline, which stops those still compiling."""
    late = [name for name in running if not (gate / name).exists()]
    if late and time.time() < deadline:
        return
    for name in late:
        os.killpg(running[name].pid, signal.SIGKILL)
        print(f"{name}: not compiled in {PATIENCE} s", flush=True)
    (gate / "open").touch()


def run_all(folder: Path, names: list[str]) -> int:
    """Start every table and report each as it ends; returns how many failed."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.time() + PATIENCE
    running: dict[str, subprocess.Popen] = {}
    received: list[int] = []  # a signal only adds its number: an exception could lose a table that was just started
    for number in STOPS:
        signal.signal(number, lambda number, _: received.append(number))
    with tempfile.TemporaryDirectory() as gate:
        try:
            for name in names:
                running[name] = start(name, folder, Path(gate))
            return _watch(running, Path(gate), deadline, received)
        finally:
            for number in STOPS:
                signal.signal(number, signal.SIG_IGN)
            for process in running.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _watch(running: dict[str, subprocess.Popen], gate: Path, deadline: float, received: list[int]) -> int:
    """Report and remove tables as they end; returns how many failed. A received signal ends it."""
    failed = 0
    while running:
        time.sleep(0.5)
        if received:
            sys.exit(128 + received[0])
        for name in [name for name, process in running.items() if process.poll() is not None]:
            code = running.pop(name).returncode
            failed += code != 0
            print(f"{name}: {'done' if code == 0 else f'failed with {code}'}", flush=True)
        if not (gate / "open").exists():
            open_when_ready(running, gate, deadline)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--"]:
        from mctf.cli import main

        sys.argv = ["mctf", *sys.argv[2:]]
        measure_one_at_a_time()
        main()
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("folder", type=Path, metavar="FOLDER")
        parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TABLES))
        arguments = parser.parse_args()
        if unknown := sorted(set(arguments.names) - set(TABLES)):
            parser.error(f"no such table: {', '.join(unknown)}; there are {', '.join(TABLES)}")
        sys.exit(run_all(arguments.folder, arguments.names or list(TABLES)))
