"""What a measurement was made on and by: device, versions, command, for the reader of its figures."""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .._utils import plural
from ..errors import MctfError


def pick_device(name: str | None) -> torch.device:
    """The device of this name, tried out; without a name the accelerator, or the CPU where there is none."""
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # fails for "meta", which holds no numbers, as for absent devices
    except (RuntimeError, AssertionError, NotImplementedError) as failure:
        reason = str(failure).splitlines()[0]
        raise MctfError(f"device {name!r} cannot be used ({reason}): write cpu or cuda") from None
    return device


def describe_device(device: torch.device) -> str:
    """Its name for a report: the GPU's model, or the processor's and the number of threads."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu ({platform.machine()}, {plural(torch.get_num_threads(), 'thread')})"
    return str(device)


def versions() -> dict[str, str]:
    """Versions of what computes the figures, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in ("mctf", "torch", "timm", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def command_line() -> str:
    """The `mctf` command of this process, as it could be typed again."""
    return shlex.join(["mctf", *sys.argv[1:]])


def commit() -> str | None:
    """The commit this code was checked out from, with a + after it if there are changes.

    The environment variable MCTF_COMMIT has the first word: code is measured on machines without its history.
    """
    if "MCTF_COMMIT" in os.environ:
        return os.environ["MCTF_COMMIT"]
    try:
        git = ["git", "-C", str(Path(__file__).parent)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
