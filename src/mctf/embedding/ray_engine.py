"""An embedding job on a Ray cluster: the same shards and the same resume; a worker that dies is replaced.

Each worker is an actor that loads the model once and embeds one shard at a time. The output folder must be one that all
machines share.
"""

import os
from collections.abc import Generator, Sequence
from typing import Any

from .._utils import first_line, optional_import
from ..errors import MctfError
from .job import EmbedJob, ShardReport, for_worker

_RESTARTS = 100  # of one worker: a machine that is lost costs one, a model that does not fit would go on for ever


class _Worker:
    """One process of the cluster."""

    def __init__(self, job: EmbedJob) -> None:
        self.job = job

    def embed(self, number: int) -> ShardReport | None:
        """Embed one shard; None where another run has finished it meanwhile."""
        return next(iter(list(self.job.run(self.job.pending([number])))), None)

    def process(self) -> int:
        return os.getpid()


def run_on_ray(
    job: EmbedJob, numbers: Sequence[int], *, address: str | None = None, actors: int | None = None
) -> Generator[ShardReport]:
    """Embed these shards and yield a report for each as soon as it is finished, in any order.

    address: of a cluster; by default one is started on this machine. actors: by default one per GPU, or one per CPU
    where there are no GPUs.
    """
    ray = optional_import("ray", extra="ray", purpose="jobs on a cluster")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
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
    resources = ray.cluster_resources()
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
    use_gpu = gpus > 0 and job.embedder.device_name in (None, "cuda")
    count = min(actors or (gpus if use_gpu else cpus), len(numbers))
    share = max(1, cpus // max(count, 1)) if use_gpu else 1
    if count > (gpus if use_gpu else cpus):
        raise MctfError(
            f"--actors {count} needs {count} {'GPUs' if use_gpu else 'CPUs'}, but the cluster has "
            f"{gpus if use_gpu else cpus}: lower it"
        )
    options = {"num_cpus": share, "num_gpus": 1 if use_gpu else 0}
    kind = ray.remote(max_restarts=_RESTARTS, max_task_retries=_RESTARTS, **options)(_Worker)
    threads = job.embedder.threads if use_gpu else job.embedder.threads or 1
    shared = ray.put(for_worker(job, threads=threads))
    workers = [kind.remote(shared) for _ in range(count)]
    waiting = list(reversed(numbers))
    running = {workers[place].embed.remote(waiting.pop()): place for place in range(count)}
    while running:
        done, _ = ray.wait(list(running), num_returns=1)
        place = running.pop(done[0])
        try:
            report = ray.get(done[0])
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
        if report is not None:
            yield report
