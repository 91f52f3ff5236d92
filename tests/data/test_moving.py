"""Host work beside a device: by one thread, and only while it lasts."""

from collections.abc import Iterator

import pytest
import torch

from mctf.data.moving import drawing_alone


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_beside_a_device_one_thread_draws() -> None:
    with drawing_alone(torch.device("cuda")):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_a_failure_gives_the_threads_back() -> None:
    with pytest.raises(KeyError), drawing_alone(torch.device("cuda")):
        raise KeyError
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_a_cpu_that_computes_keeps_its_threads() -> None:
    with drawing_alone(torch.device("cpu")):
        assert torch.get_num_threads() == 3
