"""`mctf embed` as a command: files that other libraries read, what it refuses, what it leaves out and completes.

Commands run in processes of their own, since pyarrow and torch do not end well together in a test process.
"""

import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import unittest.mock
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mctf
from helpers.command_line import Command
from helpers.forked import Forked
from helpers.images import encode, make_picture
from mctf.embedding.writers import Layout, ShardWriter

COUNT = 20
MODEL = ["test_vit", "--random-weights", "--image-size", 32, "--device", "cpu", "--batch-size", 8]
WRITE_TABLES = """
import json, sys, pyarrow, pyarrow.parquet
for path, columns in json.loads(sys.argv[1]).items():
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
"""
# A stand-in where lance is not installed: the same two functions around a parquet file.
LANCE = """
import pathlib, pyarrow.parquet
def write_dataset(table, path, mode):
    pathlib.Path(path, "data").mkdir(parents=True)
    pyarrow.parquet.write_table(table, f"{path}/data/0.parquet")
def dataset(path):
    class Dataset:
        to_table = staticmethod(lambda: pyarrow.parquet.read_table(f"{path}/data/0.parquet"))
    return Dataset
"""
WRITE_LANCE = """
import json, sys
from pathlib import Path
import lance, numpy
from mctf.embedding.writers import Layout, ShardWriter
layout = Layout(Path(sys.argv[1]), "lance", 2)
for number, count in ((0, 3), (1, 0), (0, 3)):
    writer = ShardWriter(layout, number)
    writer.open(4, "float32", 2)
    for row in range(count):
        vectors = numpy.full((1, 4), row, numpy.float32)
        writer.add([f"k{row}"], [f"p{row}"], (vectors, vectors[:, :2], numpy.full((1, 2), row)))
    writer.commit({})
tables = [lance.dataset(f"{sys.argv[1]}/0000{number}.lance").to_table() for number in (0, 1)]
print(json.dumps([tables[0].to_pydict(), tables[1].num_rows, layout.read_stats(0) is not None]))
"""
READ_KEYS = """
import glob, json, sys, pyarrow.parquet
tables = [pyarrow.parquet.read_table(path) for path in sorted(glob.glob(f"{sys.argv[1]}/*.parquet"))]
print(json.dumps([key for table in tables for key in table["key"].to_pylist()]))
"""
READ = """
import glob, json, sys
import duckdb, numpy, pyarrow.parquet as pq
folder, vectors = sys.argv[1], numpy.load(sys.argv[2])
table = pq.read_table(sorted(glob.glob(f"{folder}/*.parquet")))
rows = duckdb.sql(f"select key, path, embedding from '{folder}/*.parquet' order by key").fetchall()
order = numpy.argsort(table["key"].to_pylist())
arrow = numpy.stack(table["embedding"].to_numpy())[order]
duck = numpy.array([row[2] for row in rows], dtype=numpy.float32)
keys = [row[0] for row in rows]
print(json.dumps([keys, str(table.schema.field("embedding").type), bool((arrow == vectors).all()),
    bool((duck == vectors).all())]))
"""
WRITE_PARQUET = """
import sys, pathlib, pyarrow, pyarrow.parquet
folder = pathlib.Path(sys.argv[1])
contents = [path.read_bytes() for path in sorted(folder.glob("*.png"))]
names = [path.name for path in sorted(folder.glob("*.png"))]
table = pyarrow.table({"jpg": contents, "name": names, "number": list(range(len(names)))})
pyarrow.parquet.write_table(table, sys.argv[2], row_group_size=7)
paths = pyarrow.table({"path": [f"images/{name}" for name in names]})
pyarrow.parquet.write_table(paths, sys.argv[3])
"""

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "images"
    folder.mkdir()
    for seed in range(COUNT):
        (folder / f"{seed:02}.png").write_bytes(encode(make_picture(seed)))
    return folder


@pytest.fixture
def run(images: Path, tmp_path: Path) -> Run:
    """The command with these images, or other --data; its exit code and output."""

    def call(*more: object, data: object = images, output: object = tmp_path / "out") -> tuple[int, str]:
        words = ["embed", *MODEL, "--data", data, "--output", output, "--shard-size", 8, *more]
        started = Forked(words, log=tmp_path / "log")
        code = started.code()
        text = started.output()
        (tmp_path / "log").unlink()
        return code, text

    return call


def python(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def expected(images: Path) -> np.ndarray:
    settings = {"random_weights": True, "image_size": (32, 32), "device": "cpu", "batch_size": 8}
    embed = mctf.Embedder("test_vit", **settings)
    paths = sorted(images.glob("*.png"))
    # a job cuts its batches in every shard from its first image on, and pads the last one
    parts = [embed(paths[start : start + 8]) for start in range(0, 16, 8)]
    return np.concatenate([*parts, embed([*paths[16:], *[paths[0]] * 4])[:4]])


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.slow
def test_parquet_is_read_by_pyarrow_and_duckdb(run: Run, tmp_path: Path, expected: np.ndarray) -> None:
    pytest.importorskip("duckdb", exc_type=ImportError)
    assert run()[0] == 0
    np.save(tmp_path / "expected.npy", expected)
    keys, kind, arrow, duck = json.loads(python(READ, tmp_path / "out", tmp_path / "expected.npy"))
    assert keys == [f"{seed:02}.png" for seed in range(COUNT)]
    assert kind.endswith("[64]")
    assert arrow
    assert duck


def test_npy_has_the_layout_of_clip_retrieval(run: Run, tmp_path: Path, expected: np.ndarray) -> None:
    assert run("--format", "npy")[0] == 0
    folder = tmp_path / "out"
    vectors = [np.load(folder / "img_emb" / f"img_emb_{number:03}.npy") for number in range(3)]
    assert np.array_equal(np.concatenate(vectors), expected)
    assert sorted(path.name for path in (folder / "img_emb").iterdir()) == [f"img_emb_{n:03}.npy" for n in range(3)]
    read = "import pyarrow.parquet as pq, sys, json; table = pq.read_table(sys.argv[1]); "
    read += "print(json.dumps(table.to_pydict()))"
    for number, part in enumerate(vectors):
        rows = json.loads(python(read, folder / "metadata" / f"metadata_{number:03}.parquet"))
        assert rows.keys() == {"key", "image_path"}
        assert len(rows["key"]) == len(part)


def test_lance_datasets(tmp_path: Path) -> None:
    if importlib.util.find_spec("lance") is None:
        (tmp_path / "lance.py").write_text(LANCE)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", WRITE_LANCE, str(tmp_path / "out")]
    places = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": places}, check=False)
    assert done.returncode == 0, done.stderr
    rows, empty, finished = json.loads(done.stdout)
    assert rows["key"] == ["k0", "k1", "k2"]
    assert rows["embedding"] == [[row] * 4 for row in range(3)]
    assert rows["top_classes"] == [[row] * 2 for row in range(3)]
    assert (empty, finished) == (0, True)
    found = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert found == ["00000.lance", "00000_stats.json", "00001.lance", "00001_stats.json"]


def test_running_again_completes_what_is_missing_and_nothing_else(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert run()[0] == 0
    whole = snapshot(folder)
    code, text = run()
    assert code == 0
    assert "nothing was missing" in text
    assert snapshot(folder) == whole
    (folder / "00001_stats.json").unlink()  # an interrupted rename: the data, and no stats
    (folder / ".00001").mkdir()
    (folder / ".00001" / "rows").write_bytes(b"half")
    (folder / ".00002").mkdir()  # of a run that was killed right after its last rename
    (folder / "00000.parquet").write_bytes(b"damaged")
    assert run()[0] == 0
    after = snapshot(folder)
    assert after.keys() == whole.keys()
    assert {name for name in whole if whole[name][1] != after[name][1]} == {
        *("00000.parquet", "00000_stats.json", "00001.parquet", "00001_stats.json"),
    }
    assert all(whole[name][0] == after[name][0] for name in whole if name.endswith(".parquet"))
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_parts_make_the_whole(run: Run, tmp_path: Path) -> None:
    assert run(output=tmp_path / "whole")[0] == 0
    for part in ("2/2", "1/2"):
        assert run("--shard", part)[0] == 0
    ours, theirs = (snapshot(tmp_path / name) for name in ("out", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(ours[name][0] == theirs[name][0] for name in ours if name.endswith(".parquet"))
    assert json.loads((tmp_path / "out/manifest.json").read_text())["counts"]["images"] == COUNT


def test_ranks_of_torchrun_share_the_shards(run: Run, images: Path, tmp_path: Path) -> None:
    words = ["embed", *MODEL, "--data", images, "--output", tmp_path / "out", "--shard-size", 8]
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [
        Forked(words, log=tmp_path / f"log{rank}", environment={**address, "RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]
    assert [rank.code() for rank in ranks] == [0, 0], [rank.output() for rank in ranks]
    assert run(output=tmp_path / "whole")[0] == 0
    ours, theirs = (snapshot(tmp_path / name) for name in ("out", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(ours[name][0] == theirs[name][0] for name in ours if name.endswith(".parquet"))
    assert f"{COUNT} images in 3 shards" in ranks[0].output()
    assert "3 of 3 shards, 20 images" in ranks[0].output()
    assert ranks[1].output() == ""


def test_another_setting_is_refused(run: Run, images: Path, tmp_path: Path) -> None:
    assert run()[0] == 0
    before = snapshot(tmp_path / "out")
    fewer = shutil.copytree(images, tmp_path / "fewer")
    (fewer / "00.png").unlink()
    cases = [
        (("--normalize",), {}, "differs in normalize: False there, True here"),
        (("--method", "tome"), {}, "differs in method: 'ward' there, 'tome' here"),
        (("--flops", 0.95), {}, "differs in schedule (block "),
        (("--vector", "mean"), {}, "differs in vector: 'auto' there, 'mean' here"),
        (("--option", "rounds=8"), {}, "differs in method_options (rounds): "),
        (("--max-pixels", 50_000), {}, "differs in limits (max_pixels): 100000000 there, 50000 here"),
        (("--shard-size", 5), {}, "shard_size"),
        (("--batch-size", 4), {}, "differs in batch_size: 8 there, 4 here"),
        ((), {"data": fewer}, "differs in the images: 20 listed there, 19 listed here"),
    ]
    for more, how, says in cases:
        code, text = run(*more, **how)
        assert code == 2
        assert len(text.splitlines()) == 1
        assert says in text
        assert "name another --output" in text
    assert snapshot(tmp_path / "out") == before


def test_another_device_or_version_is_refused(run: Run, tmp_path: Path) -> None:
    assert run()[0] == 0
    (tmp_path / "out" / "00001_stats.json").unlink()
    path = tmp_path / "out" / "manifest.json"
    whole = json.loads(path.read_text())
    assert whole["device"] == "cpu"
    older = whole | {"settings": whole["settings"] | {"version": "0.0.1"}}
    for manifest, says in (
        (whole | {"device": "cuda"}, "differs in device: 'cuda' there, 'cpu' here"),
        (older, "differs in version: '0.0.1' there"),
    ):
        path.write_text(json.dumps(manifest))
        code, text = run()
        assert (code, len(text.splitlines()), says in text) == (2, 1, True), text
    path.write_text(json.dumps(whole | {"versions": whole["versions"] | {"torch": "1.0"}}))
    code, text = run()
    assert code == 0
    assert "note: " in text
    assert "torch '1.0' there" in " ".join(text.split())


def test_an_archive_of_another_dataset_is_refused(run: Run, images: Path, tmp_path: Path) -> None:
    paths = sorted(images.iterdir())
    for folder, first in (("a", 0), ("b", 10)):
        (tmp_path / folder).mkdir()
        for number in range(2):
            with tarfile.open(tmp_path / folder / f"{number}.tar", "w") as archive:
                for path in paths[first + 5 * number : first + 5 * number + 5]:
                    archive.add(path, path.name)
    assert run(data=f"{tmp_path}/a/*.tar")[0] == 0
    before = snapshot(tmp_path / "out")
    code, text = run(data=f"{tmp_path}/b/*.tar")
    assert (code, len(text.splitlines())) == (2, 1)
    assert "b/0.tar is another file than the one whose vectors" in text
    assert "remove 00000_stats.json" in text
    assert snapshot(tmp_path / "out") == before
    shutil.copytree(tmp_path / "a", tmp_path / "c")  # moved
    code, text = run(data=f"{tmp_path}/c/*.tar")
    assert (code, "nothing was missing" in text) == (0, True)


def test_other_images_of_the_same_names_are_refused(run: Run, images: Path, tmp_path: Path) -> None:
    folders = [shutil.copytree(images, tmp_path / name) for name in "ab"]
    (folders[0] / "00.png").write_bytes(b"nothing")  # may be repaired
    for folder in folders:
        (folder / "list.txt").write_text("".join(f"{path.name}\n" for path in sorted(images.iterdir())))
    assert run(data=folders[0] / "list.txt")[0] == 0
    code, text = run(data=folders[1] / "list.txt")
    assert (code, "nothing was missing" in text) == (0, True)
    wide = encode(make_picture(1, width=90, height=80))
    (folders[1] / "01.png").write_bytes(wide)
    code, text = run(data=folders[1] / "list.txt")
    assert (code, len(text.splitlines())) == (2, 1)
    assert f"b/01.png has {len(wide):,} bytes, and had" in text


def test_runs_without_a_vector_fail_again_and_again(run: Run, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    (tmp_path / "corrupt").mkdir()
    (tmp_path / "corrupt" / "0.png").write_bytes(b"nothing")
    for name, says in (
        ("empty.tar", "empty.tar holds no images"),
        ("corrupt", "none of 1 images is readable, the first: "),
    ):
        for _ in range(2):
            code, text = run(data=tmp_path / name, output=tmp_path / f"out {name}")
            assert (code, len(text.splitlines()), says in text) == (2, 1, True), text


def test_unreadable_images_are_listed_or_stop_the_run(run: Run, images: Path, tmp_path: Path) -> None:
    data = shutil.copytree(images, tmp_path / "data")
    (data / "03.png").write_bytes(b"nothing")
    (data / "17.png").write_bytes(encode(make_picture(0, width=300, height=300)))
    code, text = run("--max-pixels", 50_000, data=data)
    assert code == 0
    assert "2 images not readable" in text
    stats = [json.loads((tmp_path / f"out/{number:05}_stats.json").read_text()) for number in range(3)]
    assert [(each["images"], each["failed"]) for each in stats] == [(7, 1), (8, 0), (3, 1)]
    assert "unknown image format" in stats[0]["failures"][0]["reason"]
    listed = json.loads((tmp_path / "out/00002_failures.jsonl").read_text())
    assert listed["key"] == "17.png"
    assert "over the limit of 50,000" in listed["reason"]
    code, text = run("--max-pixels", 50_000, "--on-corrupt", "stop", data=data, output=tmp_path / "other")
    assert code == 2
    assert "03.png is not a readable image" in text
    assert len(text.splitlines()) == 1
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["manifest.json"]


@pytest.mark.slow
def test_tar_and_parquet_give_the_same_vectors(run: Run, images: Path, tmp_path: Path, expected: np.ndarray) -> None:
    python(WRITE_PARQUET, images, tmp_path / "a.parquet", images.parent / "paths.parquet")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for path in sorted(images.iterdir()):
            entry, content = tarfile.TarInfo(path.name), path.read_bytes()
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    cases = [
        (tmp_path / "a.parquet", ["--key-column", "name"]),
        (images.parent / "paths.parquet", []),
        (tmp_path / "a.tar", ["--workers", 2]),
    ]
    for number, (data, more) in enumerate(cases):
        output = tmp_path / f"out{number}"
        code, text = run("--format", "npy", *more, data=data, output=output)
        assert code == 0, text
        parts = [np.load(path) for path in sorted((output / "img_emb").iterdir())]
        assert np.array_equal(np.concatenate(parts), expected), data
    code, text = run("--column", "jpgs", data=tmp_path / "a.parquet", output=tmp_path / "none")
    assert (code, "has no column 'jpgs': did you mean 'jpg'?" in text) == (2, True)
    code, text = run("--column", "number", data=tmp_path / "a.parquet", output=tmp_path / "none")
    assert (code, "expected encoded images or paths" in text) == (2, True)
    assert not (tmp_path / "none").exists()


def test_keys_of_parquet_files_differ(run: Run, images: Path, tmp_path: Path) -> None:
    paths = [str(images / name) for name in ("00.png", "01.png")]
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    tables = {
        str(first): {"path": paths, "id": [7, 8], "name": ["a", "a"], "half": ["a", None]},
        str(second): {"path": paths, "id": [7, 7], "name": ["a", "b"], "half": ["a", "b"]},
    }
    python(WRITE_TABLES, json.dumps(tables))
    assert run(data=f"{first},{second}")[0] == 0
    keys = json.loads(python(READ_KEYS, tmp_path / "out"))
    assert keys == ["a.parquet/7", "a.parquet/8", "b.parquet/0", "b.parquet/1"]
    assert run("--key-column", "name", data=second, output=tmp_path / "one")[0] == 0
    assert json.loads(python(READ_KEYS, tmp_path / "one")) == ["a", "b"]
    for column, says in (("name", "has 0 empty values and 1 repeated one"), ("half", "has 1 empty value and 0")):
        code, text = run("--key-column", column, data=first, output=tmp_path / "none")
        assert (code, says in text, len(text.splitlines())) == (2, True, 1)


def test_a_damaged_archive_leaves_its_shard_unfinished(run: Run, images: Path, tmp_path: Path) -> None:
    whole, paths = [], sorted(images.iterdir())
    for number in range(3):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as archive:
            for path in paths[6 * number : 6 * number + 6]:
                archive.add(path, path.name)
        whole.append((tmp_path / f"{number}.tar").read_bytes())
    (tmp_path / "1.tar").write_bytes(whole[1][:5000])
    data = f"{tmp_path}/{{0..2}}.tar"
    code, text = run("--batch-size", 2, data=data)
    assert code == 2
    assert "12 images in 2 shards" in text
    assert "1 shard not finished (00001)" in text.splitlines()[-1]
    assert "1.tar cannot be read as a tar file" in text.splitlines()[-1]
    before = snapshot(tmp_path / "out")
    assert {name for name in before if name.endswith(".parquet")} == {"00000.parquet", "00002.parquet"}
    code, text = run("--batch-size", 2, "--on-corrupt", "stop", data=data)
    assert (code, len(text.splitlines())) == (2, 1)
    (tmp_path / "1.tar").write_bytes(whole[1])
    assert run("--batch-size", 2, data=data)[0] == 0
    after = snapshot(tmp_path / "out")
    assert {name for name in after if after[name] != before.get(name)} == {
        *("00001.parquet", "00001_stats.json", "manifest.json"),
    }


def test_a_missing_disk_leaves_shards_unfinished(run: Run, images: Path, tmp_path: Path) -> None:
    disk = shutil.copytree(images, tmp_path / "disk")
    (tmp_path / "list.txt").write_text("".join(f"{path}\n" for path in [*sorted(disk.iterdir()), disk / "none.png"]))
    disk.rename(tmp_path / "elsewhere")
    disk.mkdir()
    code, text = run(data=tmp_path / "list.txt")
    assert code == 2
    assert "3 shards not finished (00000, 00001, 00002)" in text
    assert "00.png cannot be read (there is no such file" in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json"]
    disk.rmdir()
    (tmp_path / "elsewhere").rename(disk)
    code, text = run(data=tmp_path / "list.txt")
    assert code == 0
    assert f"{COUNT} images" in text
    assert "1 image not readable" in text


def test_the_stats_of_a_shard(run: Run, tmp_path: Path) -> None:
    assert run()[0] == 0
    stats = json.loads((tmp_path / "out" / "00000_stats.json").read_text())
    shares = [stats[f"{name}_share"] for name in ("decoding", "model", "disk")]
    assert sum(shares) == pytest.approx(1, abs=2e-4)
    assert stats["bound"] == ("decoding", "model", "disk")[int(np.argmax(shares))]
    assert stats["images_per_second"] == pytest.approx(8 / stats["seconds"], rel=0.01)


@pytest.mark.parametrize("arrays", [(), (np.zeros((1, 4)),), (np.zeros((2, 4)), np.zeros((3, 4)))])
def test_rows_without_their_vectors_are_never_written(tmp_path: Path, arrays: tuple[np.ndarray, ...]) -> None:
    writer = ShardWriter(Layout(tmp_path, "parquet", 1), 0)
    writer._table = table = unittest.mock.Mock()
    with pytest.raises(mctf.MctfError, match=r"shard 0 has \d vectors for 2 images"):
        writer.add(["a", "b"], ["a", "b"], arrays)
    table.add.assert_not_called()
    writer.close()


@pytest.mark.parametrize(
    "stats",
    ['{"files": {}}', '{"files": {}, "images": 1, "failed": 0}', '{"files": {"data": 3}}', "[]", "{", '{"files": 3}'],
)
def test_stats_that_say_too_little(tmp_path: Path, stats: str) -> None:
    layout = Layout(tmp_path, "parquet", 1)
    (tmp_path / "data").write_bytes(b"123")
    layout.stats(0).write_text(stats)
    assert layout.read_stats(0) is None
    layout.stats(0).write_text('{"files": {"data": 3}, "images": 1, "failed": 0}')
    assert layout.read_stats(0) is not None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--data {images}", "give one of --output"),
        ("--data {images} --output out --check 5", "give one of --output"),
        ("--data nowhere --output out", "there is no nowhere"),
        ("--data {images} --output {images}/out", "lies among the images"),
        ("--data {images} --output s3://bucket/out", "is a URL"),
        ("--data {images} --output out --shard 3/2", "is no K/N"),
        ("--data {images} --output out --vector claas", "did you mean 'class'"),
        ("--data {images} --output out --actors 2", "belong to --engine ray"),
        ("--data {images} --output out --column x", "belong to parquet files"),
        ("--data {images} --output out --top-k 5000", "--top-k 5000 needs"),
        ("--data {images} --output out --decode gpu", "needs a CUDA device"),
        ("--data {images} --check 5 --engine ray", "leave out --engine"),
        ("--data {images} --check 5 --shard 1/2", "leave out --shard"),
        ("--data {images} --check 5 --format npy", "leave out --format"),
        ("--data {images} --check 5 --decode gpu", "leave out --decode"),
        ("--data {images} --output full", "holds 'a.txt' and no manifest.json"),
        ("--data {images} --output out --ray-address x", "belong to --engine ray"),
    ],
)
def test_bad_input_is_one_line(
    words: str,
    says: str,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("mine")
    command = Command(monkeypatch, capsys, "embed", *MODEL)
    assert says in command.refusal(*words.format(images=images).split())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.txt", "full"]


def test_the_check_compares_with_the_unfused_model(
    images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(monkeypatch, capsys, "embed", *MODEL, "--data", images, "--check", 15)
    facts = json.loads(command("--method", "tome", "-r", 1, "--json").out)
    assert facts["images"] == 15
    assert facts["cosine"]["least"] <= facts["cosine"]["mean"] <= 1
    assert facts["recall"].keys() == {"1", "10"}
    same = json.loads(command("-r", 0, "--json").out)
    assert same["cosine"]["least"] == pytest.approx(1, abs=1e-12)
    assert same["recall"]["10"] == {"among_others": 1, "with_query": 1, "mixed": 1}
    lines = [line.split() for line in command("-r", 0).out.splitlines()]
    assert ["recall@10", "1", "1.000"] in lines
    assert ["recall@10,", "old", "index", "1", "1.000"] in lines
