"""Worker counts, memory limits of containers, and threads beside a GPU."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mctf.data import resources
from mctf.data.resources import memory_of, num_workers, single_threaded

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class TestWorkers:
    @pytest.fixture(autouse=True)
    def sixteen_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
        monkeypatch.setattr("os.cpu_count", lambda: 64)
        for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)

    def test_beside_a_gpu(self) -> None:
        assert num_workers(100, device=CUDA) == 8

    def test_beside_a_model_on_the_cpu(self) -> None:
        assert num_workers(100, device=CPU) == 0

    def test_with_the_machine_to_itself(self) -> None:
        assert num_workers(100) == 16

    @pytest.mark.parametrize(("ranks", "expected"), [(2, (7, 8)), (4, (3, 4)), (16, (0, 1)), (32, (0, 1))])
    def test_ranks_divide_the_cores(
        self, monkeypatch: pytest.MonkeyPatch, ranks: int, expected: tuple[int, int]
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "64")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert (num_workers(100, device=CUDA), num_workers(100)) == expected

    def test_without_a_local_count_all_ranks_are_local(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert num_workers(100) == 4

    def test_requested_number(self) -> None:
        assert [num_workers(100, device=device, requested=5) for device in (CUDA, CPU, None)] == [5, 5, 5]
        assert num_workers(100, device=CUDA, requested=0) == 0

    def test_requested_number_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert num_workers(10_000, device=CPU, requested=500) == 64
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
        assert num_workers(10_000, device=CPU, requested=500) == 8

    def test_no_more_than_batches(self) -> None:
        assert (num_workers(3, device=CUDA), num_workers(3), num_workers(3, requested=5)) == (3, 3, 3)


class TestMemory:
    @pytest.fixture
    def cgroup(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(resources, "_CGROUP_ROOT", tmp_path)
        monkeypatch.setattr(resources, "_CGROUP_OF_PROCESS", tmp_path / "self")
        return tmp_path

    @pytest.mark.usefixtures("cgroup")
    def test_without_limits(self) -> None:
        assert memory_of(CPU) == PHYSICAL

    @pytest.mark.parametrize(
        ("of_process", "file"),
        [
            ("0::/\n", "memory.max"),
            ("0::/kubepods/pod7\n", "kubepods/pod7/memory.max"),
            ("0::/kubepods/pod7\n", "kubepods/memory.max"),  # the limit of an ancestor
            ("0::/../../elsewhere\n", "memory.max"),  # a container that mounts only its own group
            ("11:cpu:/x\n9:memory:/docker/3f\n0::/\n", "memory/docker/3f/memory.limit_in_bytes"),
            ("9:memory:/docker/3f\n", "memory/memory.limit_in_bytes"),
        ],
    )
    def test_limit_of_the_container(self, cgroup: Path, of_process: str, file: str) -> None:
        (cgroup / "self").write_text(of_process)
        (cgroup / file).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / file).write_text("12345678\n")
        assert memory_of(CPU) == 12345678

    @pytest.mark.parametrize(
        ("file", "content"), [("memory.max", "max\n"), ("memory/memory.limit_in_bytes", "9223372036854771712\n")]
    )
    def test_group_without_a_limit(self, cgroup: Path, file: str, content: str) -> None:
        (cgroup / file).parent.mkdir(exist_ok=True)
        (cgroup / file).write_text(content)
        assert memory_of(CPU) == PHYSICAL


class TestThreads:
    @pytest.fixture(autouse=True)
    def three_threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        yield
        torch.set_num_threads(before)

    def test_one_beside_a_gpu(self) -> None:
        with single_threaded(CUDA):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3

    def test_restored_after_an_error(self) -> None:
        with pytest.raises(KeyError), single_threaded(CUDA):
            raise KeyError
        assert torch.get_num_threads() == 3

    def test_unchanged_on_the_cpu(self) -> None:
        with single_threaded(CPU):
            assert torch.get_num_threads() == 3
