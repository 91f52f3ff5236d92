"""Distributed execution: the rank of this process, its device, and collectives that also work in a single process."""

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
    """rank: of this process, from 0. world_size: number of processes. device: of this process."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1


@contextmanager
def init_distributed(device: torch.device) -> Iterator[DistributedContext]:
    """The process group of torchrun (`WORLD_SIZE`), or a single process without one.

    NCCL on GPUs, one process per GPU, else Gloo. The group is destroyed at the end, but not after an error: other
    ranks may be waiting in a collective, and torchrun terminates them.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield DistributedContext(0, 1, device)
        return
    if device.type == "cuda":
        local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= count:
            raise MctfError(
                f"process {local_rank} has no GPU, there are only {count}: start torchrun --nproc-per-node {count}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield DistributedContext(dist.get_rank(), dist.get_world_size(), device)
    dist.destroy_process_group()


def all_gather_object(value: Any) -> list[Any]:
    """The values of all ranks, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: Any) -> Any:
    """The value of rank 0, on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
