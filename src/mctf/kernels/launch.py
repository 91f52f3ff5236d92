"""Whether Triton kernels are used, and how they are launched from an operator."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# Fixed at import: a compiled model cannot ask the environment.
wanted = find_spec("triton") is not None and os.environ.get("MCTF_KERNELS", "1") != "0"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU, slowly: for tests


def launchable(kernel: Any) -> Any:
    """The kernel in the form torch.compile can see through: it then launches it without going through Python."""
    if INTERPRETED:
        return kernel
    wrapped = torch.library.wrap_triton(kernel)
    launched_here = wrapped is kernel  # torch.compile guards the device itself
    return OnItsDevice(kernel) if launched_here and torch.cuda.device_count() > 1 else wrapped


class OnItsDevice:
    """A kernel that runs on the GPU of its first tensor. Triton would take the current one, wherever tensors are."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(first: Tensor, *others: Any, **options: Any) -> None:
            with torch.cuda.device_of(first):
                self.kernel[grid](first, *others, **options)

        return launch


def varies(number: int) -> bool:
    """Whether a number is a variable of the graph under compilation: the kernel then has to serve all its values.

    Choosing a tile by it would compile the graph anew for each.
    """
    return isinstance(number, torch.SymInt)


def channels_last(x: Tensor) -> Tensor:
    """Kernels take any strides but that of the channels, which must lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def widths(q: Tensor, precise: str = "ieee") -> dict[str, Any]:
    """Head width, its power of two, and how float32 tensors are multiplied; others lose nothing in one product."""
    channels = q.shape[3]
    precision = precise if q.dtype == torch.float32 else "tf32"
    return {"D": max(16, 1 << (channels - 1).bit_length()), "DIM": channels, "PRECISION": precision}


@contextmanager
def plain_operations() -> Iterator[None]:
    """Everything inside is computed without Triton, by the plain versions: what the kernels are checked against."""
    global wanted
    before, wanted = wanted, False
    try:
        yield
    finally:
        wanted = before
