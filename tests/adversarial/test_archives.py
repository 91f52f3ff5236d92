"""Hostile and odd folders, zip files and class tables: refused in one line, or read right."""

import json
import os
import shlex
import struct
import subprocess
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.command_line import Outcome
from helpers.images import encode, make_picture, write_folder, zip_folder
from mctf import MctfError
from mctf.data import ReadLimits, open_dataset

FIRST, SECOND = encode(make_picture(0)), encode(make_picture(1))
BOMB = bytes(20_000_000)


def pack(path: Path, *entries: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return path


def patch(path: Path, *, local: int | None = None, central: int | None = None, value: bytes) -> Path:
    """Other bytes at an offset of the first local header, and of the first entry of the directory."""
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        if offset is not None:
            start = data.index(signature) + offset
            data[start : start + len(value)] = value
    path.write_bytes(bytes(data))
    return path


def good(folder: Path) -> Path:
    return pack(folder / "x.zip", ("a/1.png", FIRST), ("b/2.png", SECOND))


def append(path: Path, data: bytes) -> Path:
    path.write_bytes(path.read_bytes() + data)
    return path


def cut(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


def tar(folder: Path, mode: str) -> Path:
    with tarfile.open(folder / "x.tar", mode) as archive:  # type: ignore[call-overload]
        archive.add(write_folder(folder / "y", "a/1.png"))
    return folder / "x.tar"


def bad_crc(folder: Path) -> Path:
    path = good(folder)
    path.write_bytes(path.read_bytes().replace(FIRST, FIRST[:-9] + b"damaged!!"))
    return path


def lying(folder: Path, method: int, size: int) -> Path:
    """A member that unpacks to more than its header says."""
    path = pack(folder / "x.zip", ("a/1.png", BOMB), method=method)
    value = struct.pack("<I", size)
    return patch(path, local=22, central=24, value=value)


def linked(folder: Path, **links: str) -> Path:
    write_folder(folder / "x", "a/1.png", "b/2.png")
    for link, target in links.items():
        (folder / "x" / link).symlink_to(target)
    return folder / "x"


def made(path: Path, make: Callable[[Path], object]) -> Path:
    make(path)
    return path


# what is given as --data, and a part of the message
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no such path": (lambda folder: folder / "nowhere", "there is no"),
    "below a file": (lambda folder: good(folder) / "a", "there is no"),
    "long name": (lambda folder: folder / ("x" * 300), "File name too long"),
    "null character": (lambda folder: "a\0b", "there is no"),
    "line break": (lambda folder: "a\nb", "there is no a\\nb"),
    "empty": (lambda folder: "", "--data is empty, as by an unset shell variable"),
    "spaces": (lambda folder: "  ", "--data is empty"),
    "comma": (lambda folder: ",", "--data is empty"),
    "empty second name": (lambda folder: f"{good(folder)},", "--data is empty"),
    "empty folder": (lambda folder: made(folder / "x", Path.mkdir), "is empty"),
    "named pipe": (lambda folder: made(folder / "x", os.mkfifo), "named pipe, not a regular file"),
    "endless device": (lambda folder: "/dev/zero", "device, not a regular file"),
    "null device": (lambda folder: "/dev/null", "device, not a regular file"),
    "link to a device": (lambda folder: made(folder / "x", lambda path: path.symlink_to("/dev/zero")), "device"),
    "link to itself": (lambda folder: made(folder / "x", lambda path: path.symlink_to("x")), "symbolic links"),
    "empty file": (lambda folder: made(folder / "x.zip", Path.touch), "neither a folder nor a readable zip file"),
    "text": (lambda folder: made(folder / "x.zip", lambda path: path.write_text("text")), "neither a folder nor"),
    "one image": (lambda folder: write_folder(folder, "x.png") / "x.png", "neither a folder nor"),
    "tar": (lambda folder: tar(folder, "w"), "is a tar archive: unpack it"),
    "compressed tar": (lambda folder: tar(folder, "w:gz"), "is a gzip archive: unpack it"),
    "bzip2": (lambda folder: tar(folder, "w:bz2"), "is a bzip2 archive: unpack it"),
    "xz": (lambda folder: tar(folder, "w:xz"), "is a xz archive: unpack it"),
    "empty zip": (lambda folder: pack(folder / "x.zip"), "is empty"),
    "zip of folders": (lambda folder: pack(folder / "x.zip", ("a/", b""), ("b/", b"")), "is empty"),
    "zip of text": (lambda folder: pack(folder / "x.zip", ("a/1.txt", b"text")), "holds no images"),
    "zip of zips": (lambda folder: pack(folder / "x.zip", ("a/1.zip", good(folder).read_bytes())), "holds no images"),
    "half a zip": (lambda folder: cut(good(folder), 900), "truncated zip file"),
    "beginning of a zip": (lambda folder: cut(good(folder), 8), "truncated zip file"),
    "much after the end": (lambda folder: append(good(folder), bytes(100_000)), "truncated zip file"),
    "version of the directory": (lambda folder: patch(good(folder), central=6, value=b"\xff"), "cannot be read as a"),
    "signature of the directory": (
        lambda folder: patch(good(folder), central=0, value=b"PK\x09\x09"),
        "cannot be read as",
    ),
    "length of a name": (lambda folder: patch(good(folder), central=28, value=b"\xff\xff"), "x.zip"),
    "name outside": (lambda folder: pack(folder / "x.zip", ("../a/1.png", FIRST)), "which lies outside of it"),
    "name far outside": (lambda folder: pack(folder / "x.zip", ("a/../../1.png", FIRST)), "which lies outside of it"),
    "classes and loose": (lambda folder: pack(folder / "x.zip", ("a/1.png", FIRST), ("2.png", FIRST)), "side by side"),
    "encrypted": (lambda folder: patch(good(folder), local=6, central=8, value=b"\1"), "it is encrypted"),
    "unknown compression": (lambda folder: patch(good(folder), local=8, central=10, value=b"\x63"), "a/1.png"),
    "damaged member": (bad_crc, "Bad CRC-32"),
    "member elsewhere": (lambda folder: patch(good(folder), central=42, value=b"\xff\xff\0\0"), "a/1.png"),
    "another name inside": (lambda folder: patch(good(folder), local=30, value=b"z"), "a/1.png"),
    "large member": (lambda folder: patch(good(folder), local=22, central=24, value=b"\0\0\0\x7f"), "--max-bytes"),
    "small deflated member": (lambda folder: lying(folder, zipfile.ZIP_DEFLATED, 100), "a/1.png"),
    "small bzip2 member": (lambda folder: lying(folder, zipfile.ZIP_BZIP2, 100), "a/1.png"),
    "small lzma member": (lambda folder: lying(folder, zipfile.ZIP_LZMA, 100), "a/1.png"),
    "two links to one folder": (lambda folder: linked(folder, c="a"), "are one folder, whose images would count twice"),
    "link to a folder beside it": (lambda folder: linked(folder, d="b"), "remove one of the links"),
    "loose and linked": (lambda folder: linked(folder, **{"3.png": "a/1.png"}), "side by side"),
}


def many(folder: Path) -> Path:
    return pack(folder / "x.zip", ("a/1.png", FIRST), *((f"b/{number}.txt", b"") for number in range(20_000)))


# odd, and right: what is given as --data, and the names of the images
ACCEPTED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "link to itself": (lambda folder: linked(folder, self="."), ["a/1.png", "b/2.png"]),
    "link to a folder above": (lambda folder: linked(folder, **{"a/up": "../.."}), ["a/1.png", "b/2.png"]),
    "links to one file": (
        lambda folder: linked(folder, **{"a/3.png": "1.png", "b/4.png": "../a/1.png"}),
        ["a/1.png", "a/3.png", "b/2.png", "b/4.png"],
    ),
    "link to a folder elsewhere": (
        lambda folder: linked(folder, c=str(write_folder(folder / "y", "3.png"))),
        ["a/1.png", "b/2.png", "c/3.png"],
    ),
    "hidden folder": (lambda folder: write_folder(folder / "x", "a/1.png", ".git/b/2.png"), ["a/1.png"]),
    "comma in the name": (lambda folder: write_folder(folder / "x,y", "a/1.png"), ["a/1.png"]),
    "line break in the name": (lambda folder: write_folder(folder / "x\ny", "a/1.png"), ["a/1.png"]),
    "bytes in the name": (
        lambda folder: write_folder(folder / os.fsdecode(b"x\xff"), os.fsdecode(b"a\xfe/1\xfd.png")),
        [os.fsdecode(b"a\xfe/1\xfd.png")],
    ),
    "bytes after the end": (lambda folder: append(good(folder), b"\r\n\r\n"), ["a/1.png", "b/2.png"]),
    "bytes before the start": (
        lambda folder: made(folder / "y.zip", lambda path: path.write_bytes(b"#!sh\n" + good(folder).read_bytes())),
        ["a/1.png", "b/2.png"],
    ),
    "absolute names": (lambda folder: pack(folder / "x.zip", ("/a/1.png", FIRST), ("/b/2.png", SECOND)),
                       ["a/1.png", "b/2.png"]),
    "names from here": (lambda folder: pack(folder / "x.zip", ("./a/1.png", FIRST)), ["a/1.png"]),
    "double separators": (lambda folder: pack(folder / "x.zip", ("a//1.png", FIRST)), ["a/1.png"]),
    "backslashes": (lambda folder: pack(folder / "x.zip", ("a\\1.png", FIRST), ("b\\2.png", SECOND)),
                    ["a/1.png", "b/2.png"]),
    "other suffix": (lambda folder: good(folder).rename(folder / "x.bin"), ["a/1.png", "b/2.png"]),
    "many entries": (many, ["a/1.png"]),
    "bzip2 members": (
        lambda folder: pack(folder / "x.zip", ("a/1.png", FIRST), method=zipfile.ZIP_BZIP2),
        ["a/1.png"],
    ),
    "lzma members": (lambda folder: pack(folder / "x.zip", ("a/1.png", FIRST), method=zipfile.ZIP_LZMA), ["a/1.png"]),
    "images of macos": (
        lambda folder: pack(folder / "x.zip", ("a/1.png", FIRST), ("__MACOSX/a/._1.png", b"fork")),
        ["a/1.png"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str, tmp_path: Path, refused: Callable[[str, str], str]) -> None:
    make, says = REFUSED[kind]
    refused(f"eval embedded_small --data {shlex.quote(str(make(tmp_path)))} -r 0", says)


@pytest.mark.parametrize("kind", ACCEPTED)
def test_accepted(kind: str, tmp_path: Path, accepted: Callable[[str], Outcome]) -> None:
    make, names = ACCEPTED[kind]
    source = str(make(tmp_path))
    dataset = open_dataset(source)
    assert dataset.names == names
    assert np.array_equal(np.asarray(dataset.read(0)), np.asarray(make_picture(0)))
    outcome = accepted(f"eval embedded_small --data {shlex.quote(source)} -r 0 --json")
    assert outcome.err == ""
    assert json.loads(outcome.out)["images"] == len(names)


def test_more_folders_than_calls_may_nest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        for _ in range(1200):
            os.mkdir("a")
            os.chdir("a")
        Path("1.png").write_bytes(FIRST)
        assert open_dataset(tmp_path).read(0).size == (48, 40)
    finally:
        os.chdir(tmp_path)
        subprocess.run(["rm", "-rf", "a"], check=True)  # Python's own way has the same limit


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_last_of_several_members_with_one_name(tmp_path: Path) -> None:
    dataset = open_dataset(pack(tmp_path / "x.zip", ("a/1.png", SECOND), ("./a/1.png", SECOND), ("a/1.png", FIRST)))
    assert dataset.names == ["a/1.png"]
    assert np.array_equal(np.asarray(dataset.read(0)), np.asarray(make_picture(0)))


def test_directory_of_many_large_files(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive, archive.open("a/1.png", "w", force_zip64=True) as member:
        member.write(FIRST)
    assert open_dataset(tmp_path / "x.zip").read(0).size == (48, 40)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("claimed", [None, 1000, 900_000])
def test_bomb_takes_little_memory(method: int, claimed: int | None, tmp_path: Path) -> None:
    archive = pack(tmp_path / "x.zip", ("a/1.png", BOMB), method=method)
    if claimed is not None:
        archive = lying(tmp_path, method, claimed)
    dataset = open_dataset(archive, limits=ReadLimits(max_bytes=10**6))
    tracemalloc.start()
    with pytest.raises(MctfError, match="is not a readable image"):
        dataset.read(0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (5 if method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) else 60) * 10**6


def test_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "x", "a/1.png", "b/2.png")
    scandir = os.scandir

    def forbid(path: Path) -> object:
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("mctf.data.readers.os.scandir", forbid)
    with pytest.raises(MctfError, match=r"x/b cannot be read \(Permission denied\): make it readable, or remove it"):
        open_dataset(folder)


TABLES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "there is no class table"),
    "folder": (Path.mkdir, "it is a folder"),
    "named pipe": (os.mkfifo, "it is a named pipe"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    "broken link": (lambda path: path.symlink_to("nowhere"), "there is no class table"),
    "empty": (Path.touch, "is empty"),
    "blank": (lambda path: path.write_text("\n \n\t\n"), "is empty"),
    "binary": (lambda path: path.write_bytes(bytes(range(256))), "is not UTF-8 text"),
    "zeros": (lambda path: path.write_bytes(bytes(999)), "line 1"),
    "utf-16": (lambda path: path.write_text("0\ta\n", encoding="utf-16"), "is not UTF-8 text"),
    "huge": (lambda path: (path.touch(), os.truncate(path, 2**40)), "over the limit"),
    "no tab": (lambda path: path.write_text("0 a\n1 b\n"), "between tabs"),
    "no index": (lambda path: path.write_text("a\tb\n"), "between tabs"),
    "no folder": (lambda path: path.write_text("0\t\n"), "between tabs"),
    "negative index": (lambda path: path.write_text("-1\ta\n"), "between tabs"),
    "fraction": (lambda path: path.write_text("0.5\ta\n"), "between tabs"),
    "large index": (lambda path: path.write_text(f"{10**30}\ta\n"), "the model has 200 classes"),
    "index of many digits": (lambda path: path.write_text("9" * 5000 + "\ta\n"), "the model has 200 classes"),
    "folder twice": (lambda path: path.write_text("0\ta\n1\ta\n"), "again"),
    "terminal command": (lambda path: path.write_text("\x1b[31mred\ta\n"), "between tabs"),
    "long line": (lambda path: path.write_text("x" * 10**6), "between tabs"),
    "another class": (lambda path: path.write_text("0\tz\n"), "class 'a'"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_class_table(kind: str, tmp_path: Path, refused: Callable[[str, str], str]) -> None:
    make, says = TABLES[kind]
    make(tmp_path / "classes.tsv")
    refused(f"eval embedded_small --data {good(tmp_path)} -r 0 --classes {tmp_path}/classes.tsv", says)


def test_class_table_of_training_has_bounded_indices(tmp_path: Path) -> None:
    (tmp_path / "classes.tsv").write_text(f"0\ta\n{10**30}\tb\n")
    with pytest.raises(MctfError, match=r"line 2 of .* has class 10000000000000000000: number the classes from 0"):
        open_dataset(good(tmp_path), classes=tmp_path / "classes.tsv")


def test_mutations_of_a_zip_file_never_raise_another_error(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    original = zip_folder(write_folder(tmp_path / "x", "a/1.png", "b/2.png"), tmp_path / "x.zip").read_bytes()
    directory = original.index(b"PK\x01\x02")
    for number in range(200):
        changed = bytearray(original)
        for position in random.integers(directory if number % 2 else 0, len(changed), 1 + number % 4):
            changed[position] = random.integers(0, 256)
        (tmp_path / "x.zip").write_bytes(bytes(changed[: len(changed) - number % 3 * 7]))
        try:
            dataset = open_dataset(tmp_path / "x.zip")
            dataset.digest()
            for index in range(len(dataset)):
                dataset.read(index)
        except MctfError as error:
            assert str(error).isprintable()  # noqa: PT017
