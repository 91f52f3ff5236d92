"""Distributed execution: the rank of this process, its device, and collectives that also work in a single process."""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ._utils import first_line
from .errors import MctfError

Value = TypeVar("Value")
_LONGEST_WAIT = timedelta(days=7)  # torchrun ends all ranks where one is lost


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


def read_ranks(device: torch.device) -> DistributedContext:
    """What torchrun says about this process, with the GPU of its own, or a single process; joins no group."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return DistributedContext(0, 1, device)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        if not os.environ.get(name, "0").isdecimal():
            raise MctfError(f"{name}={os.environ[name]} is not a number of processes: start them with torchrun")
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ["WORLD_SIZE"])
    if rank >= world_size:
        raise MctfError(f"RANK={rank} is not below WORLD_SIZE={world_size}: start the processes with torchrun")
    if device.type == "cuda":
        local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= count:
            raise MctfError(
                f"process {local_rank} has no GPU, there are only {count}: start torchrun --nproc-per-node {count}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    return DistributedContext(rank, world_size, device)


@contextmanager
def init_distributed(device: torch.device) -> Iterator[DistributedContext]:
    """The process group of torchrun (`WORLD_SIZE`), or a single process without one.

    NCCL on GPUs, one process per GPU, else Gloo. The group is destroyed at the end, but not after an error: other
    ranks may be waiting in a collective, and torchrun terminates them. Raises MctfError where another rank ends early.
    """
    context = read_ranks(device)
    if not context.is_distributed:
        yield context
        return
    device = context.device
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except (ValueError, RuntimeError) as failure:
        raise MctfError(f"the processes find no group ({first_line(failure)}): start them with torchrun") from None
    try:
        yield context
    except RuntimeError as failure:
        if not isinstance(failure, dist.DistError) and "by peer" not in str(failure):
            raise
        raise MctfError(
            f"process {context.rank} lost another process, whose message says why: start all of them again"
        ) from None
    dist.destroy_process_group()


def all_gather_object(value: Any) -> list[Any]:
    """The values of all ranks, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_at_end(distributed: DistributedContext, value: Any) -> list[Any]:
    """The values of all ranks on rank 0, which waits for the last one; on others, their own.

    Ranks need no group before. Where they do not find each other, each has its own value alone.
    """
    if not distributed.is_distributed or "MASTER_ADDR" not in os.environ:
        return [value]
    rank, world_size = distributed.rank, distributed.world_size
    try:
        rendezvous = dist.rendezvous("env://", rank=rank, world_size=world_size, timeout=_LONGEST_WAIT)
        store = dist.PrefixStore("mctf/end", next(rendezvous)[0])
        store.set(str(rank), pickle.dumps(value).hex())
        if not distributed.is_main:
            return [value]
        return [pickle.loads(bytes.fromhex(store.get(str(number)).decode())) for number in range(world_size)]
    except (ValueError, RuntimeError):  # no network, or a rank is lost
        return [value]


def broadcast_object(value: Any) -> Any:
    """The value of rank 0, on every rank."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def on_main(distributed: DistributedContext, work: Callable[[], Value]) -> Value:
    """The value of `work()` on rank 0, on every rank; an MctfError is raised on every rank, so that none waits."""
    value, refusal = None, None
    if distributed.is_main:
        try:
            value = work()
        except MctfError as error:
            refusal = str(error)
    value, refusal = broadcast_object((value, refusal))
    if refusal is not None:
        raise MctfError(refusal)
    return value
