"""The recorded conditions of a measurement: device, versions, and the commit of mctf and of nothing else."""

import subprocess
from pathlib import Path

import pytest
import torch

import mctf
from mctf import MctfError
from mctf.evaluation.environment import commit, describe_device, pick_device, versions


def test_device_and_versions() -> None:
    cpu = pick_device("cpu")
    assert cpu == torch.device("cpu")
    threads = torch.get_num_threads()
    assert describe_device(cpu).endswith(", 1 thread)" if threads == 1 else f", {threads} threads)")
    assert versions()["mctf"] == mctf.__version__
    assert "click" in versions("click", "no_such_package")
    assert "click" not in versions()


@pytest.mark.parametrize("name", ["nonsense", "meta", "cuda:97"])
def test_absent_devices_are_refused(name: str) -> None:
    with pytest.raises(MctfError, match=f"device '{name}' cannot be used .*: write cpu or cuda"):
        pick_device(name)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with one commit, a tracked module and an untracked one in .venv."""
    monkeypatch.delenv("MCTF_COMMIT", raising=False)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("src/module.py", ".venv/lib/module.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text(".venv\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    for arguments in (["init", "-q"], ["add", "src", ".gitignore"], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True, capture_output=True)
    return tmp_path


def test_commit_is_that_of_the_repository_that_tracks_the_code(project: Path) -> None:
    head = subprocess.run(["git", "-C", project, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    assert commit(project / "src" / "module.py") == head.stdout.strip()
    (project / "src" / "module.py").write_text("changed")
    assert commit(project / "src" / "module.py") == head.stdout.strip() + "+"


def test_commit_of_another_project_is_not_recorded(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in the virtual environment of a project lies inside its repository without being part of it."""
    installed = project / ".venv" / "lib" / "module.py"
    assert commit(installed) is None
    monkeypatch.setenv("MCTF_COMMIT", "abc1234")
    assert commit(installed) == "abc1234"
