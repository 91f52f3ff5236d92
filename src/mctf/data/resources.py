"""Hardware of this process: CPU cores for loader workers, memory limits, and copies to a device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

_MAX_WORKERS = 8  # more rarely help a loader, and each costs start-up time and memory
_MAX_WORKERS_PER_CORE = 4  # of those that a user asks for: more spend their time on waiting for each other
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_OF_PROCESS = Path("/proc/self/cgroup")


def num_workers(num_batches: int, *, device: torch.device | None = None, requested: int | None = None) -> int:
    """Worker processes for a loader of this rank, never more than it has batches.

    requested: a number that the user gave, of which at most 4 per core are started, or 8. Otherwise the cores in the
    affinity mask of this process are divided by the ranks on this machine. device: where the model runs meanwhile. A
    GPU keeps one core for the main process and at most 8 workers. A CPU gets none: workers would compete with the
    model. None: nothing else runs.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if requested is None:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
        share = max(1, cores // local_ranks)
        requested = share if device is None else 0 if device.type == "cpu" else min(_MAX_WORKERS, share - 1)
    return min(requested, num_batches, max(_MAX_WORKERS, _MAX_WORKERS_PER_CORE * cores))


def memory_of(device: torch.device) -> int:
    """Total memory in bytes: of the GPU, or of the host within the limit of the container.

    Total and not free memory, since a resumed run must decide as the first one did.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_cgroup_limits(_CGROUP_ROOT, _CGROUP_OF_PROCESS)])


def _cgroup_limits(root: Path, of_process: Path) -> Iterator[int]:
    """Memory limits in bytes of this process's control group and its ancestors, cgroup v2 and v1 alike.

    A container that mounts only its own group has it at the root, whatever path /proc names.
    """
    groups = {"": "/", "memory": "/"}  # controller: path below the root
    with suppress(OSError):
        for line in of_process.read_text().splitlines():  # "0::/path" (v2) or "9:memory:/path" (v1)
            _, controllers, path = line.split(":", 2)
            groups.update(dict.fromkeys(set(controllers.split(",")) & groups.keys(), path))
    for controller, file in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        base = root / controller
        group = base / groups[controller].lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            with suppress(OSError, ValueError):  # no such file, or "max"
                yield int((folder / file).read_text())


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from the host without waiting for the work queued on the device."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


@contextmanager
def single_threaded(device: torch.device) -> Iterator[None]:
    """Runs CPU operations in one thread while the heavy work is on another device.

    The random numbers of a batch are a few thousand. On a machine of many cores, waking the other threads took longer
    than the rest of a step.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
