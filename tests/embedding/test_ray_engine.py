"""Which workers a job asks a cluster for, and what they do; the cluster is a stand-in."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.images import write_folder
from mctf import Embedder, MctfError
from mctf.cli import embed as cli
from mctf.embedding import ray_engine
from mctf.embedding.job import EmbedJob, ShardReport
from mctf.embedding.sources import open_source


class Call:
    """One that is done."""

    def __init__(self, reports: list[ShardReport]) -> None:
        self.reports = reports


class Cluster:
    """Machines with resources; every call of a worker is done at once. starts: whether workers find a place."""

    class exceptions:  # noqa: N801  # as in ray
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            pass

    def __init__(self, *machines: dict[str, float], starts: bool = True) -> None:
        self.machines, self.starts, self.options, self.calls = machines, starts, {}, []

    def nodes(self) -> list[dict[str, Any]]:
        lost = {"Alive": False, "Resources": {"CPU": 1.0, "GPU": 1.0}}
        return [lost, *({"Alive": True, "Resources": each} for each in self.machines)]

    def remote(self, **options: object) -> Any:
        self.options = options
        return lambda _kind: SimpleNamespace(remote=self.worker)

    def worker(self, _job: object, _folder: Path) -> Any:
        def embed(numbers: list[int]) -> Any:
            self.calls.append(numbers)
            return Call([ShardReport(number) for number in numbers])

        ready, embed = SimpleNamespace(remote=lambda: "ready"), SimpleNamespace(remote=embed)
        return SimpleNamespace(ready=ready, embed=embed)

    def put(self, job: EmbedJob) -> EmbedJob:
        self.job = job
        return job

    def wait(self, calls: list[Any], **_options: object) -> tuple[list[Any], list[Any]]:
        return (calls[:1], calls[1:]) if self.starts else ([], calls)

    def get(self, call: Any) -> Any:
        return call.reports


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbedJob:
    write_folder(tmp_path / "images", "0.png")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.pt").touch()
    return EmbedJob(open_source("images"), Path("out"), Embedder("test_vit", weights="weights.pt"), "test_vit")


def run(cluster: Cluster, job: EmbedJob, count: int, **options: int) -> list[int]:
    return [report.number for report in ray_engine._run(cluster, job, list(range(count)), options.get("actors"))]


@pytest.mark.parametrize(
    ("machines", "count", "cpus"),
    [
        ([{"CPU": 16.0, "GPU": 1.0}] * 4, 1, 16),
        ([{"CPU": 16.0, "GPU": 4.0}, {"CPU": 64.0, "GPU": 4.0}, {"CPU": 128.0}], 9, 4),
        ([{"CPU": 2.0, "GPU": 4.0}], 9, 1),
        ([{"CPU": 8.0}], 9, 1),
    ],
)
def test_a_worker_asks_for_what_one_machine_has(
    job: EmbedJob, machines: list[dict[str, float]], count: int, cpus: int
) -> None:
    cluster = Cluster(*machines)
    assert sorted(run(cluster, job, count)) == list(range(count))
    assert cluster.options["num_cpus"] == cpus
    assert cluster.options["num_gpus"] == int("GPU" in machines[0])


def test_shards_come_in_calls_of_several(job: EmbedJob) -> None:
    cluster = Cluster({"CPU": 2.0})
    assert sorted(run(cluster, job, 37)) == list(range(37))
    assert [len(call) for call in cluster.calls] == [4] * 9 + [1]


def test_workers_that_find_no_place_are_an_error(job: EmbedJob) -> None:
    with pytest.raises(MctfError, match="no worker started within 600 s: each needs 4 CPUs and a GPU of one machine"):
        run(Cluster({"CPU": 8.0, "GPU": 2.0}, starts=False), job, 3)
    with pytest.raises(MctfError, match="--actors 3 needs 3 GPUs, but the cluster has 2"):
        run(Cluster({"CPU": 8.0, "GPU": 2.0}), job, 3, actors=3)


def test_workers_get_whole_paths(job: EmbedJob, tmp_path: Path) -> None:
    cluster = Cluster({"CPU": 1.0})
    run(cluster, job, 1)
    assert cluster.job.output == tmp_path / "out"
    assert cluster.job.embedder.weights == tmp_path / "weights.pt"
    assert cluster.job.source.digest() == job.source.digest()


def test_the_bar_of_a_cluster_shows_images_per_second(job: EmbedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    class Bar:
        describe = texts.append

        def __call__(self, steps: int = 1) -> None:
            pass

    def run_on_ray(*_arguments: object, **_options: object) -> Any:
        yield from (ShardReport(number, images=10) for number in range(2))

    monkeypatch.setattr(ray_engine, "run_on_ray", run_on_ray)
    monkeypatch.setattr(cli, "progress", lambda *_arguments, **_options: nullcontext(Bar()))
    cli._run(job, [0], engine="ray", address=None, actors=None, wanted=None, title="embedding")
    assert len(texts) == 2
    assert all(text.startswith("embedding, ") and text.endswith(" images/s") for text in texts)


def test_a_worker_checks_its_machine(job: EmbedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("ray.get", lambda job: job)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    worker = ray_engine._Worker([dataclasses.replace(job, decode="gpu")], tmp_path)
    assert Path.cwd() == tmp_path
    with pytest.raises(MctfError, match="name an --output that all machines share"):
        worker.embed([0])
