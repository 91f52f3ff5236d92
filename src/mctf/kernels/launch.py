"""Whether kernels are used, and how an operator launches those of Triton."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# Read once, at import: torch.compile cannot trace reads of the environment.
enabled = os.environ.get("MCTF_KERNELS", "1") != "0"
HAS_TRITON, HAS_NUMBA = find_spec("triton") is not None, find_spec("numba") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU, slowly: for tests


@contextmanager
def disable_kernels() -> Iterator[None]:
    """Inside, everything is computed by the plain PyTorch versions, which the kernels are checked against."""
    global enabled
    before, enabled = enabled, False
    try:
        yield
    finally:
        enabled = before


def launchable(kernel: Any) -> Any:
    """The kernel in the form that torch.compile traces; a compiled graph then launches it without Python."""
    if INTERPRETED:
        return kernel
    wrapped = torch.library.wrap_triton(kernel)
    is_eager = wrapped is kernel  # torch.compile sets the device itself
    return DeviceGuarded(kernel) if is_eager and torch.cuda.device_count() > 1 else wrapped


class DeviceGuarded:
    """A kernel that runs on the GPU of its first tensor. Triton by itself takes the current GPU."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(first: Tensor, *others: Any, **options: Any) -> None:
            with torch.cuda.device_of(first):
                self.kernel[grid](first, *others, **options)

        return launch


def is_symbolic(number: int) -> bool:
    """Whether a number is a variable of the graph under compilation.

    A tile chosen by such a number would compile one graph per value, so the kernel that serves all values is taken.
    """
    return isinstance(number, torch.SymInt)


def contiguous_channels(x: Tensor) -> Tensor:
    """x with a stride of 1 in its last axis. Kernels take any stride in the others."""
    return x if x.stride(-1) == 1 else x.contiguous()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
