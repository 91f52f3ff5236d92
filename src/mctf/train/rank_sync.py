"""What all processes must know of each other in every step: whether one was interrupted, or got a loss that is none.

A notice is posted after each step and read while the next is under way: by then the device has computed it, so that
reading it holds nothing up. All processes read the same notices and stop after the same step.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import DistributedContext


@dataclass(frozen=True)
class Notice:
    """Of all processes after one step. signal: that interrupted one of them, 0 if none."""

    step: int
    signal: int
    finite: bool


class Watch:
    """One notice at a time: `post` after a step, `read` once afterwards."""

    def __init__(self, processes: DistributedContext) -> None:
        self._processes = processes
        self._posted: tuple[int, _Landing] | None = None

    def post(self, step: int, *, signal: int, finite: Tensor) -> None:
        """finite: a scalar on the device, whether this process' loss and gradient are numbers."""
        notice = torch.stack([torch.full_like(finite, signal, dtype=torch.float32), 1.0 - finite.float()])
        if self._processes.is_distributed:
            dist.all_reduce(notice, dist.ReduceOp.MAX)
        self._posted = step, _Landing(notice)

    def read(self) -> Notice | None:
        """What was posted last, unless it was read already."""
        if self._posted is None:
            return None
        step, landing = self._posted
        self._posted = None
        signal, broken = landing.numbers()
        return Notice(step, int(signal), finite=broken == 0)


class _Landing:
    """A tensor on its way to the host. Reading it waits for what was queued before it, not for what came after."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._arrived = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def numbers(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()
