"""Agreement of all ranks after each step: whether one received a signal or computed a non-finite loss.

The status of a step is reduced over all ranks and copied to the host without synchronization. It is read during the
next step, when the device has computed it, so reading does not stall. All ranks read the same status and stop after the
same step.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import DistributedContext


@dataclass(frozen=True)
class StepStatus:
    """The status of one step, over all ranks. signal: number of a received signal, 0 for none."""

    step: int
    signal: int
    finite: bool


class RankSync:
    """Holds one status: `post` after a step, `read` once afterwards."""

    def __init__(self, distributed: DistributedContext) -> None:
        self._distributed = distributed
        self._pending: tuple[int, _HostCopy] | None = None

    def post(self, step: int, *, signal: int, finite: Tensor) -> None:
        """finite: a scalar on the device, whether loss and gradient of this rank are finite."""
        status = torch.stack([torch.full_like(finite, signal, dtype=torch.float32), 1.0 - finite.float()])
        if self._distributed.is_distributed:
            dist.all_reduce(status, dist.ReduceOp.MAX)
        self._pending = step, _HostCopy(status)

    def read(self) -> StepStatus | None:
        """The last posted status; None where it was read before."""
        if self._pending is None:
            return None
        step, copy = self._pending
        self._pending = None
        signal, non_finite = copy.values()
        return StepStatus(step, int(signal), finite=non_finite == 0)


class _HostCopy:
    """An asynchronous copy to the host. Reading it waits for work queued before it, not for work queued later."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def values(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
