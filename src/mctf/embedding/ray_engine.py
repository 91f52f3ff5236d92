"""An embedding job on a Ray cluster: the same shards and the same resume; a worker that dies is replaced.

Each worker is an actor that loads the model once and embeds a few shards per call. The output folder must be one that
all machines share.
"""

import os
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._utils import first_line, optional_import, plural
from ..errors import MctfError
from .embedder import Embedder
from .job import MANIFEST, EmbedJob, ShardReport

_RESTARTS = 100  # of one worker: a machine that is lost costs one, a model that does not fit would go on for ever
_START = 600.0  # seconds until the first worker runs; a cluster that grows starts machines meanwhile
_SHARDS = 8  # per call at most: a worker decodes ahead from shard to shard within one call


class _Worker:
    """One process of the cluster."""

    def __init__(self, job: list[Any], folder: Path) -> None:
        """job: a reference to it in a list. As an argument by itself, a worker that restarts might not find it.

        folder: in which the command was started. Names of images are relative to it.
        """
        import ray

        with suppress(OSError):
            os.chdir(folder)
        self.job: EmbedJob = ray.get(job[0])

    def ready(self) -> None:
        """Raise MctfError where this process cannot do the job."""
        if not (self.job.output / MANIFEST).exists():
            raise MctfError(f"a worker finds no {self.job.output}: name an --output that all machines share")
        self.job.check_device()

    def embed(self, numbers: list[int]) -> list[ShardReport]:
        """Embed these shards, without those that another run has finished meanwhile."""
        self.ready()
        return list(self.job.run(self.job.pending(numbers)))


def _for_worker(job: EmbedJob, *, threads: int | None) -> EmbedJob:
    """The job for one of several workers of a machine, which has so many CPU threads; files by their whole paths."""
    embedder = Embedder.__new__(Embedder)
    state = job.embedder.__getstate__()
    weights = state["weights"] and state["weights"].absolute()
    embedder.__setstate__(state | {"threads": threads, "weights": weights})
    return replace(job, embedder=embedder, output=job.output.absolute())


def run_on_ray(
    job: EmbedJob, numbers: Sequence[int], *, address: str | None = None, actors: int | None = None
) -> Generator[ShardReport]:
    """Embed these shards and yield a report for each as soon as it is finished, in any order.

    address: of a cluster; by default one is started on this machine. actors: by default one per GPU, or one per CPU
    where there are no GPUs.
    """
    ray = optional_import("ray", extra="ray", purpose="jobs on a cluster")
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="error")
    except Exception as failure:  # ConnectionError, ValueError and RuntimeError, by version
        where = f"at {address}" if address else "on this machine"
        raise MctfError(
            f"no Ray cluster can be used {where} ({first_line(failure):.160}): check --ray-address"
        ) from None
    try:
        yield from _run(ray, job, list(numbers), actors)
    finally:
        ray.shutdown()


def _run(ray: Any, job: EmbedJob, numbers: list[int], actors: int | None) -> Generator[ShardReport]:
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus, cpus = (sum(int(each.get(name, 0)) for each in machines) for name in ("GPU", "CPU"))
    use_gpu = gpus > 0 and job.embedder.device_name in (None, "cuda")
    count = min(actors or (gpus if use_gpu else cpus) or 1, len(numbers))
    share = 1  # CPUs of one worker, which every machine with a GPU has for each of its GPUs
    if use_gpu:
        share = max(1, min(int(each.get("CPU", 0) // each["GPU"]) for each in machines if each.get("GPU")))
    if count > (gpus if use_gpu else cpus):
        raise MctfError(
            f"--actors {count} needs {count} {'GPUs' if use_gpu else 'CPUs'}, but the cluster has "
            f"{gpus if use_gpu else cpus}: lower it"
        )
    options = {"num_cpus": share, "num_gpus": 1 if use_gpu else 0}
    kind = ray.remote(max_restarts=_RESTARTS, max_task_retries=_RESTARTS, **options)(_Worker)
    threads = job.embedder.threads if use_gpu else job.embedder.threads or 1
    shared = ray.put(_for_worker(job, threads=threads))
    workers = [kind.remote([shared], Path.cwd()) for _ in range(count)]
    if not ray.wait([worker.ready.remote() for worker in workers], num_returns=1, timeout=_START)[0]:
        needs = plural(share, "CPU") + (" and a GPU" if use_gpu else "")
        raise MctfError(
            f"no worker started within {_START:.0f} s: each needs {needs} of one machine, so wait until the cluster "
            "has these free, or end what holds them"
        )
    size = max(1, min(_SHARDS, len(numbers) // (4 * count)))  # the last calls are short enough to share the rest out
    waiting = [numbers[start : start + size] for start in range(0, len(numbers), size)][::-1]
    running = {worker.embed.remote(waiting.pop()): place for place, worker in enumerate(workers) if waiting}
    while running:
        done, _ = ray.wait(list(running), num_returns=1)
        place = running.pop(done[0])
        try:
            reports = ray.get(done[0])
        except ray.exceptions.RayTaskError as failure:
            if isinstance(failure.cause, MctfError):
                raise MctfError(str(failure.cause)) from None
            raise
        except ray.exceptions.RayError as failure:
            raise MctfError(
                f"a worker was lost {_RESTARTS} times or cannot start ({first_line(failure):.160}): run the "
                "command again; finished shards are whole"
            ) from None
        if waiting:
            running[workers[place].embed.remote(waiting.pop())] = place
        yield from reports
