"""Sources: which images they have, in which order, and in which shards."""

import errno
import gzip
import io
import os
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from helpers.images import encode, make_picture, write_folder, zip_folder
from mctf import MctfError
from mctf.data import ReadLimits
from mctf.data.decode import UnreadableError
from mctf.embedding import archives, names
from mctf.embedding.names import (
    CompactNames,
    UnavailableError,
    expand_pattern,
    read_location,
    resolve_beside,
    split_sources,
)
from mctf.embedding.sources import Item, Source, open_source


def all_items(source: Source, size: int = 3) -> list[Item]:
    return [item for shard in source.shards(size) for item in source.items(shard)]


def write_tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def picture(seed: int) -> bytes:
    return encode(make_picture(seed))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images", "loose.png", "b/1.png", "b/0.jpg", "a/deep/er/2.png", "b/.hidden.png")


def test_a_folder_may_be_nested_in_any_way(folder: Path) -> None:
    source = open_source(folder)
    assert [item.key for item in all_items(source)] == ["loose.png", "a/deep/er/2.png", "b/0.jpg", "b/1.png"]
    assert [source.decode(item).size for item in all_items(source)] == [(48, 40)] * 4


def test_a_zip_file_has_the_same_images(folder: Path, tmp_path: Path) -> None:
    source, archive = open_source(folder), open_source(zip_folder(folder, tmp_path / "images.zip"))
    assert {item.key for item in all_items(archive)} == {item.key for item in all_items(source)}
    assert {source.content(item) for item in all_items(source)} == {archive.content(i) for i in all_items(archive)}


def test_shards_cover_everything_once(folder: Path) -> None:
    source = open_source(folder)
    whole = all_items(source, 100)
    for size in (1, 2, 3, 4):
        assert all_items(source, size) == whole
        assert all(shard.stop - shard.start <= size for shard in source.shards(size) if shard.stop is not None)


def test_keys_of_several_sources_differ(folder: Path, tmp_path: Path) -> None:
    both = open_source(f"{folder},{zip_folder(folder, tmp_path / 'images.zip')}")
    keys = [item.key for item in all_items(both)]
    assert len(set(keys)) == len(keys) == 8
    for part in "xy":
        (tmp_path / part).mkdir()
        write_tar(tmp_path / part / "0.tar", {"0.png": picture(0), "1.png": picture(1)})
    tars = open_source(f"{tmp_path}/*/0.tar")
    assert [item.key for item in all_items(tars)] == ["x/0.tar/0", "x/0.tar/1", "y/0.tar/0", "y/0.tar/1"]
    with pytest.raises(MctfError, match="twice: name it once"):
        open_source(f"{folder},{folder}/../images")


def test_lines_of_a_text_file_differ(folder: Path) -> None:
    (folder / "list.txt").write_text("b/1.png\nloose.png\nb/1.png\n")
    with pytest.raises(MctfError, match="repeats 1 line, and lines are keys"):
        open_source(folder / "list.txt")


def test_missing_beside_others_is_unreadable_and_a_missing_disk_is_not(folder: Path, tmp_path: Path) -> None:
    limits = ReadLimits()
    with pytest.raises(UnreadableError, match="there is no such file"):
        read_location(f"{folder}/b/none.png", limits)
    (tmp_path / "unmounted").mkdir()
    for path in (f"{tmp_path}/unmounted/0.png", f"{tmp_path}/unmounted/a/b/0.png"):
        with pytest.raises(UnavailableError, match="there is no such file"):
            read_location(path, limits)


def test_errors_of_disks_are_no_errors_of_images(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    sources = [open_source(folder), open_source(write_tar(tmp_path / "a.tar", {"0.png": picture(0)}))]
    cases = [(0, errno.EIO, UnavailableError), (0, errno.EACCES, UnreadableError), (1, errno.EIO, UnavailableError)]
    for place, number, kind in cases:
        item = all_items(sources[place])[0]
        monkeypatch.setattr(os, "pread" if place else "open", fail)
        with pytest.raises(kind, match=os.strerror(number)):
            sources[place].content(item)
        monkeypatch.undo()
    archive = zip_folder(folder, tmp_path / "images.zip")
    source = open_source(archive)
    item = all_items(source)[0]
    source.parts[0].reader._handle = None  # as in another process
    archive.unlink()
    with pytest.raises(UnavailableError, match="cannot be read as a zip file"):
        source.content(item)


@pytest.mark.parametrize(("status", "passes"), [(503, True), (429, True), (404, False), (410, False)])
def test_errors_of_servers(monkeypatch: pytest.MonkeyPatch, status: int, passes: bool) -> None:
    class ServerError(Exception):
        pass

    class System:
        def open(self, *_arguments: object) -> NoReturn:
            error = ServerError("no")
            error.status = status
            raise error

    monkeypatch.setattr(names, "file_system", lambda url: (System(), url))
    with pytest.raises(UnavailableError if passes else ServerError):
        read_location("https://example.org/0.png", ReadLimits())


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz")])
def test_a_tar_file_is_one_shard(tmp_path: Path, name: str, mode: str) -> None:
    files = {"./x/0.png": picture(0), "x/0.json": b"{}", "x/1.jpg.png": picture(1), "x/1.jpg.webp": picture(2)}
    source = open_source(write_tar(tmp_path / name, files, mode))
    assert len(source.shards(1)) == 1
    items = all_items(source)
    assert [item.key for item in items] == ["x/0", "x/1.jpg", "x/1.jpg.webp"]
    assert [source.content(item) for item in items] == [picture(0), picture(1), picture(2)]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
@pytest.mark.parametrize(
    ("cut", "says"),
    [
        (lambda tar, second: tar[:second] + b"damaged!" + tar[second + 8 :], "bad checksum"),
        (lambda tar, second: tar[:second], "ends without the mark of its end"),
        (lambda tar, second: tar[: second + 100], "truncated header"),
        (lambda tar, second: tar[: second + 512 + 30], "unexpected end of data"),
    ],
)
@pytest.mark.parametrize("last", ["1.png", "1.json"])
def test_a_damaged_tar_file_is_refused(
    tmp_path: Path, name: str, cut: Callable[[bytes, int], bytes], says: str, last: str
) -> None:
    whole = write_tar(tmp_path / "whole.tar", {"0.png": picture(0), last: picture(1)}).read_bytes()
    second = 512 + -(-len(picture(0)) // 512) * 512
    damaged = cut(whole, second)
    (tmp_path / name).write_bytes(gzip.compress(damaged) if name.endswith("gz") else damaged)
    with pytest.raises(MctfError, match=says):
        all_items(open_source(tmp_path / name))


def test_memory_does_not_grow_with_a_tar_file(tmp_path: Path) -> None:
    peaks = []
    for count in (300, 3000):
        source = open_source(write_tar(tmp_path / f"{count}.tar", {f"{number}.png": b"x" for number in range(count)}))
        (shard,) = source.shards(1)
        assert sum(1 for _ in source.items(shard)) == count
        tracemalloc.start()
        for _ in source.items(shard):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 500_000  # digests of keys; headers of 2,700 more entries would take 3 MB


def test_paths_take_little_memory() -> None:
    tracemalloc.start()
    names = CompactNames(f"folder/class_{number // 100}/image_{number}.jpg" for number in range(100_000))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_500_000
    assert [names[0], names[1500], len(names)] == [
        "folder/class_0/image_0.jpg",
        "folder/class_15/image_1500.jpg",
        100_000,
    ]


def test_names_need_not_be_utf8() -> None:
    odd = os.fsdecode(b"\xff\xfe.png")
    assert CompactNames([odd])[0] == odd


def test_a_text_file_names_paths_beside_it(folder: Path) -> None:
    (folder / "list.txt").write_text(f"b/1.png\n\n{folder}/loose.png\nb/none.png\n")
    source = open_source(folder / "list.txt")
    items = all_items(source)
    assert [source.decode(item).size for item in items[:2]] == [(48, 40)] * 2
    with pytest.raises(MctfError, match="there is no such file"):
        source.decode(items[2])


def test_a_line_is_its_key(folder: Path) -> None:
    (folder / "list.txt").write_text(f"b/1.png\n{folder}/loose.png\n")
    items = all_items(open_source(folder / "list.txt"))
    assert [item.key for item in items] == ["b/1.png", f"{folder}/loose.png"]
    assert [item.path for item in items] == [f"{folder}/b/1.png", f"{folder}/loose.png"]


def test_paths_of_remote_lists_start_at_their_folder(tmp_path: Path) -> None:
    system = pytest.importorskip("fsspec").filesystem("memory")
    system.pipe("/lists/a/0.png", picture(0))
    system.pipe("/lists/1.png", picture(1))
    system.pipe("/lists/a/list.txt", b"0.png\n../1.png\nmemory://lists/1.png\n")
    source = open_source("memory://lists/a/list.txt")
    assert [source.content(item) for item in all_items(source)] == [picture(0), picture(1), picture(1)]
    assert resolve_beside("s3://bucket/a/b.parquet", "c/0.png") == "s3://bucket/a/c/0.png"
    assert resolve_beside("s3://bucket/a/b.parquet", "/c/0.png") == "/c/0.png"
    assert resolve_beside("s3://bucket/a/", "c//0.png") == "s3://bucket/a/c//0.png"


def test_archives_beside_images_are_embedded(folder: Path, tmp_path: Path) -> None:
    write_tar(folder / "b" / "0.tar", {"x.png": picture(0)})
    zip_folder(write_folder(tmp_path / "more", "y.png"), folder / "1.zip")
    with zipfile.ZipFile(folder / "annotations.zip", "w") as archive:
        archive.writestr("a.json", "{}")
    keys = [item.key for item in all_items(open_source(folder), 100)]
    loose = ["loose.png", "a/deep/er/2.png", "b/0.jpg", "b/1.png"]
    assert keys == [*(f"images/{name}" for name in loose), "1.zip/y.png", "0.tar/x"]


def test_links_in_tar_files_are_failures(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"0.png": picture(0)})
    with tarfile.open(tmp_path / "a.tar", "a") as archive:
        for name, kind in (("1.png", tarfile.LNKTYPE), ("2.png", tarfile.SYMTYPE), ("3.png", tarfile.FIFOTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "" if kind == tarfile.FIFOTYPE else "0.png"
            archive.addfile(entry)
        folder = tarfile.TarInfo("4.png")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    packed = tmp_path / "a.tar.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    for path in (tmp_path / "a.tar", packed):
        source = open_source(path)
        items = all_items(source)
        assert [item.key for item in items] == ["0", "1", "2", "3"]
        assert source.content(items[0]) == picture(0)
        for item, says in zip(items[1:], ["a link to 0.png", "a link to 0.png", "no regular file"], strict=True):
            with pytest.raises(MctfError, match=says):
                source.decode(item)


def test_keys_of_a_tar_file_differ(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for seed, name in enumerate(["a.png", "b.png", "a.jpg", "a.png", "a.png", "./a.png", "a.png#2.png"]):
            entry, content = tarfile.TarInfo(name), picture(seed)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    keys = [item.key for item in all_items(open_source(tmp_path / "a.tar"))]
    assert keys == ["a", "b", "a.jpg", "a.png", "a.png#2", "a.png#3", "a.png#2.png"]


def test_checksums_tell_files_of_one_name_apart(tmp_path: Path) -> None:
    contents = [picture(seed) for seed in range(9)]
    size = max(map(len, contents))
    contents = [content.ljust(size, b"\0") for content in contents]
    checksums = []
    for seeds in ((0, 1, 2), (0, 1, 2), (0, 3, 2), (0, 1)):
        path = write_tar(tmp_path / "a.tar", {f"{place}.png": contents[seed] for place, seed in enumerate(seeds)})
        checksums.append(open_source(path).parts[0].checksum)
    assert checksums[0] == checksums[1]
    assert len(set(checksums)) == 3
    system = pytest.importorskip("fsspec").filesystem("memory")
    for _ in range(2):
        system.pipe("/sums/a.tar", path.read_bytes())
        checksums.append(open_source("memory://sums/a.tar").parts[0].checksum)
        assert open_source("memory://sums/a.tar").parts[0].checksum == checksums[-1]
    assert len(set(checksums)) == 5


def test_patterns(folder: Path, tmp_path: Path) -> None:
    assert expand_pattern("s-{008..011}.tar") == [f"s-{number}.tar" for number in ("008", "009", "010", "011")]
    assert expand_pattern("{a,b}{1..2}") == ["a1", "a2", "b1", "b2"]
    assert split_sources("{a,b}.tar, c.zip") == ["{a,b}.tar", "c.zip"]
    for number in range(3):
        write_tar(tmp_path / f"{number}.tar", {"0.png": picture(0)})
    assert len(open_source(f"{tmp_path}/*.tar").parts) == 3
    assert len(open_source(f"{tmp_path}/{{0..1}}.tar").parts) == 2
    with pytest.raises(MctfError, match="no file matches"):
        expand_pattern(f"{tmp_path}/none*.tar")


def test_urls_are_read_by_fsspec(folder: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    system.pipe("/mctf/a/0.png", picture(0))
    system.pipe("/mctf/1.png", picture(1))
    source = open_source("memory://mctf")
    assert [item.key for item in all_items(source)] == ["1.png", "a/0.png"]
    assert source.decode(all_items(source)[0]).size == (48, 40)


def test_the_digest_notices_a_change(folder: Path) -> None:
    before = open_source(folder).digest()
    assert open_source(folder).digest() == before
    (folder / "b" / "2.png").write_bytes(picture(9))
    assert open_source(folder).digest() != before


def test_limits_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar", {"0.png": picture(0)})
    source = open_source(path, limits=ReadLimits(max_bytes=10))
    with pytest.raises(MctfError, match="over the limit"):
        source.decode(all_items(source)[0])
    monkeypatch.setattr(archives, "DEFAULT_LIMITS", ReadLimits(max_bytes=10))
    packed = write_tar(tmp_path / "b.tar.gz", {"0.png": picture(0)}, "w:gz")
    source = open_source(packed, limits=ReadLimits(max_bytes=10**6))
    assert source.content(all_items(source)[0]) == picture(0)
    source = open_source(path, limits=ReadLimits(max_pixels=10))
    with pytest.raises(MctfError, match="over the limit of 10"):
        source.decode(all_items(source)[0])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "a name in --data is empty"),
        ("nowhere", "there is no"),
        ("empty", "is empty"),
        ("text", "is no source of images"),
        ("text.tar", "cannot be read as a tar file"),
        ("text.parquet", "is damaged"),
        ("blank.txt", "is empty"),
        ("binary.txt", "is not UTF-8"),
        ("s{9..1}.tar", "is empty or too long"),
        ("documents", "holds no images"),
        ("none://x/y", "cannot be opened"),
    ],
)
def test_bad_sources_are_refused(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "a.doc").write_bytes(b"")
    for text in ("text", "text.tar", "text.parquet"):
        (tmp_path / text).write_text("nothing")
    (tmp_path / "blank.txt").write_text("\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MctfError, match=says):
        all_items(open_source(name if "://" in name or not name else str(tmp_path / name)))


def test_columns_belong_to_parquet(folder: Path) -> None:
    with pytest.raises(MctfError, match="--column and --key-column belong to parquet"):
        open_source(folder, column="image")


def test_a_sample_is_spaced(folder: Path) -> None:
    source = open_source(folder)
    assert [item.key for item in source.sample(2)] == ["loose.png", "b/0.jpg"]
    assert len(list(source.sample(99))) == 4


@pytest.mark.parametrize(("count", "taken"), [(2, "ab"), (3, "abc"), (4, "aabc"), (6, "aabccc"), (99, "aabccccc")])
def test_a_sample_has_images_of_every_archive(tmp_path: Path, count: int, taken: str) -> None:
    for name, images in (("a", 2), ("b", 1), ("c", 5)):
        write_tar(tmp_path / f"{name}.tar", {f"{number}.png": b"" for number in range(images)})
    found = [item.key for item in open_source(tmp_path).sample(count)]
    assert len(set(found)) == len(found)
    assert "".join(sorted(key[0] for key in found)) == taken
