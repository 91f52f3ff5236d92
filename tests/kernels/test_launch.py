"""How kernels are launched: on the GPU where their tensors are."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from mctf.kernels import launch


class Kernel:
    """Stands for a Triton kernel: notes the device that is current when it is launched."""

    def __init__(self, current: list[str]) -> None:
        self.current = current
        self.launches: list[tuple] = []

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *values, **options: self.launches.append((self.current[-1], grid, values[1:], options))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """On a machine of two GPUs, of which the first is the current one, and outside of torch.compile."""
    current = ["cuda:0"]

    @contextmanager
    def device_of(tensor: SimpleNamespace):
        current.append(tensor.device)
        yield
        current.pop()

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: kernel)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    return Kernel(current)


def test_a_kernel_runs_where_its_tensors_are(kernel: Kernel) -> None:
    launch.launchable(kernel)[(3, 2)](SimpleNamespace(device="cuda:1"), 7, num_warps=4)
    assert kernel.launches == [("cuda:1", (3, 2), (7,), {"num_warps": 4})]


def test_a_single_gpu_needs_no_guard(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert launch.launchable(kernel) is kernel


def test_a_compiled_kernel_is_left_to_the_compiler(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    traceable = object()
    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: traceable)
    assert launch.launchable(kernel) is traceable
