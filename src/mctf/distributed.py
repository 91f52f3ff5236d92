"""The processes of one run: a single one, or several that torchrun started side by side."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .errors import MctfError


@dataclass(frozen=True)
class DistributedContext:
    """Which of `world` processes this one is (from 0), and the device that it computes on."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes for all of them."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.world > 1


@contextmanager
def init_distributed(device: torch.device) -> Iterator[DistributedContext]:
    """Joins the group that torchrun announces in the environment; without one this process is alone.

    GPUs speak by nccl, one a process; everything else speaks by gloo. The group is left at the end, but not after an
    error: others may still wait for this process, and torchrun ends them.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield DistributedContext(0, 1, device)
        return
    device = _own_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield DistributedContext(dist.get_rank(), dist.get_world_size(), device)
    dist.destroy_process_group()


def _own_device(device: torch.device, local_rank: int) -> torch.device:
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise MctfError(
            f"process {local_rank} has no GPU, there are only {count}: start torchrun --nproc-per-node {count}"
        )
    own = torch.device("cuda", local_rank)
    torch.cuda.set_device(own)
    return own


def all_gather_object(value: Any) -> list[Any]:
    """What every process of the group gives, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: Any) -> Any:
    """What the first process gives, in every process."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
