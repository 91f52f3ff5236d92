"""Small tensors made on the host, and on their way to a device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on the device, without waiting for the work that is queued there."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


@contextmanager
def drawing_alone(device: torch.device) -> Iterator[None]:
    """What the host computes within is computed by one thread, if the heavy work is done elsewhere.

    A few thousand numbers a batch are worth no second thread. On a machine of many cores, waking the others up and
    waiting for them took longer than the rest of a step.
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
