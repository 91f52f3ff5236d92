"""The conditions of a measurement, recorded beside its figures: device, versions, command, commit."""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .._utils import first_line, plural
from ..errors import MctfError

_REASON = 160  # characters of an exception's text in a message


def pick_device(name: str | None) -> torch.device:
    """The device of this name, tested with a small tensor; without a name the accelerator, else the CPU."""
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # fails for "meta", which holds no numbers, as for absent devices
    except (RuntimeError, AssertionError, NotImplementedError) as failure:
        reason = first_line(failure).split(". ")[0][:_REASON]  # torch adds paragraphs
        raise MctfError(f"device {name!r} cannot be used ({reason}): write cpu or cuda") from None
    return device


def set_threads(count: int | None) -> None:
    """Let torch use this many CPU threads; None for its own choice. Refuses more than any machine profits from."""
    if count is None:
        return
    most = max(64, 4 * (os.cpu_count() or 1))
    if not 1 <= count <= most:
        raise MctfError(f"threads = {count} is out of range on this machine: choose from 1 to {most}")
    torch.set_num_threads(count)


def describe_device(device: torch.device) -> str:
    """The device for a report: the GPU's model, or the processor's architecture, vector instructions and threads."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        threads = plural(torch.get_num_threads(), "thread")
        return f"cpu ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {threads})"
    return str(device)


def versions(*others: str) -> dict[str, str]:
    """Versions of Python and of the installed packages that compute the figures. others: packages of this run."""
    installed = {"python": platform.python_version()}
    for name in dict.fromkeys(("mctf", "torch", "timm", "triton", *others)):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def command_line() -> str:
    """The `mctf` command of this process, as it could be typed again."""
    return shlex.join(["mctf", *sys.argv[1:]])


def commit(file: Path = Path(__file__)) -> str | None:
    """The commit that this source file was checked out from, followed by + if the checkout has changes.

    None where git does not track the file: a package installed inside another project's checkout is not part of that
    project. The environment variable MCTF_COMMIT takes precedence, for machines that have no history of the code.
    """
    if "MCTF_COMMIT" in os.environ:
        return os.environ["MCTF_COMMIT"]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
