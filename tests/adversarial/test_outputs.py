"""Where output goes: links keep their place, devices and pipes are written to, nothing else is replaced."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.command_line import Outcome
from mctf import MctfError
from mctf._utils import atomic_write, check_folder, check_target

EVAL = "eval embedded_small --data {images} -r 0 --limit 2 --output "


@pytest.fixture(autouse=True)
def _count(record_property: Callable[[str, object], None]) -> None:
    record_property("cases", ["output", 1])


def write(path: Path, text: str = "new") -> None:
    check_target(path)
    atomic_write(path, text.encode())


class TestLinks:
    def test_the_target_of_a_link_is_written(self, workdir: Path, command: Callable[[str], Outcome]) -> None:
        target = workdir / "deep" / "target.json"
        target.parent.mkdir()
        target.write_text("old")
        (workdir / "link.json").symlink_to("deep/target.json")
        assert command(EVAL + "link.json").code == 0
        assert (workdir / "link.json").is_symlink()
        assert json.loads(target.read_text())["model"] == "embedded_small"
        assert sorted(path.name for path in target.parent.iterdir()) == ["target.json"]

    def test_a_chain_of_links(self, workdir: Path) -> None:
        (workdir / "end").write_text("old")
        (workdir / "second").symlink_to("end")
        (workdir / "first").symlink_to("second")
        write(Path("first"))
        assert (workdir / "end").read_text() == "new"
        assert (workdir / "first").is_symlink()
        assert (workdir / "second").is_symlink()

    def test_a_link_to_a_file_that_does_not_exist_yet(self, workdir: Path) -> None:
        (workdir / "link").symlink_to("file")
        write(Path("link"))
        assert (workdir / "file").read_text() == "new"
        assert (workdir / "link").is_symlink()

    @pytest.mark.parametrize("target", ["itself", "missing/file", "."])
    def test_links_to_nowhere_are_refused(self, workdir: Path, target: str) -> None:
        (workdir / "itself").symlink_to(target)
        with pytest.raises(MctfError):
            check_target(Path("itself"))
        assert (workdir / "itself").is_symlink()

    def test_a_folder_behind_a_link(self, workdir: Path) -> None:
        (workdir / "real").mkdir()
        (workdir / "alias").symlink_to("real")
        write(Path("alias/file"))
        assert (workdir / "real" / "file").read_text() == "new"


class TestStreams:
    def test_a_device_stays_a_device(self, workdir: Path) -> None:
        master, slave = pty.openpty()
        terminal = Path(os.ttyname(slave))
        write(terminal, "to a terminal")
        assert os.read(master, 100) == b"to a terminal"
        assert terminal.is_char_device()

    def test_a_full_device_is_named(self, files: dict[str, str]) -> None:
        if "full" not in files:
            pytest.skip("device nodes can be made by root alone")
        with pytest.raises(MctfError, match="No space left on device"):
            write(Path(files["full"]))
        assert Path(files["full"]).is_char_device()

    def test_a_pipe_that_is_read(self, workdir: Path) -> None:
        os.mkfifo("pipe")
        text = "x" * 200_000  # more than a pipe holds
        reader = subprocess.Popen([sys.executable, "-c", "print(len(open('pipe').read()))"], stdout=subprocess.PIPE)
        held = os.open("pipe", os.O_WRONLY)  # returns when the reader has opened it
        write(Path("pipe"), text)
        os.close(held)
        assert reader.communicate()[0] == b"200000\n"

    def test_a_pipe_that_nobody_reads(self, workdir: Path) -> None:
        os.mkfifo("pipe")
        with pytest.raises(MctfError, match="a pipe that no program reads"):
            check_target(Path("pipe"))

    def test_a_socket(self, workdir: Path) -> None:
        import socket

        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket")
            with pytest.raises(MctfError, match="not a regular file"):
                check_target(Path("socket"))

    @pytest.mark.slow
    def test_stdout_by_its_name(self, workdir: Path, files: dict[str, str]) -> None:
        line = f"{sys.executable} -m mctf " + EVAL.format(images=files["images"]) + "/dev/stdout"
        subprocess.run(line + " > out.txt", shell=True, check=True)
        text = (workdir / "out.txt").read_text()
        assert json.JSONDecoder().raw_decode(text)[0]["model"] == "embedded_small"
        assert "embedded_small on 2 images" in text, "the table follows the JSON object"


class TestFiles:
    def test_permissions_stay(self, workdir: Path) -> None:
        (workdir / "private").write_text("old")
        (workdir / "private").chmod(0o600)
        write(Path("private"))
        assert (workdir / "private").read_text() == "new"
        assert (workdir / "private").stat().st_mode & 0o777 == 0o600

    def test_a_long_name(self, workdir: Path) -> None:
        write(Path("🦊" * 60 + ".json"))
        assert [path.name for path in workdir.iterdir()] == ["🦊" * 60 + ".json"]
        with pytest.raises(MctfError):
            check_target(Path("x" * 256))

    @pytest.mark.parametrize("folder", ["file", "file/deep", "/proc/run", "/dev/null", "/dev/null/deep", "x" * 256])
    def test_folders_that_cannot_be_written(self, workdir: Path, folder: str) -> None:
        (workdir / "file").touch()
        with pytest.raises(MctfError, match="name another"):
            check_folder(Path(folder), "name another")
        assert [path.name for path in workdir.iterdir()] == ["file"]

    def test_checking_leaves_nothing(self, workdir: Path) -> None:
        check_folder(Path("new/deep"), "name another")
        check_target(Path("new.json"))
        assert not list(workdir.iterdir())
