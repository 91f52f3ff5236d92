"""The commands of docs/index.md, run as a stranger would: `python -m helpers.five_minutes` clones the repository first.

The page's `sh` blocks are the script, so that page and script cannot diverge. What `make demo` says to type next runs
after it, before the environment is activated. `photo.jpg` and `photos`, which a stranger brings along, are photographs
of scikit-image. `mctf playground` serves until it is stopped: it is asked for its page.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/index.md"
SERVES = "mctf playground"
DEMO = "make demo"
ACTIVATE = ". .venv/bin/activate"
COPY = """
import shutil, sys, importlib.util
from pathlib import Path
data = Path(importlib.util.find_spec("skimage").origin).parent / "data"
target = Path(sys.argv[1])
(target / "photos").mkdir()
shutil.copy(data / "rocket.jpg", target / "photo.jpg")
for name in ("chelsea.png", "coffee.png", "rocket.jpg", "astronaut.png"):
    shutil.copy(data / name, target / "photos")
"""


def commands(page: str) -> list[str]:
    """The lines of the page's sh blocks. Those below the activation of the environment run after it, in its shell."""
    blocks = re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line]
    first = lines.index(ACTIVATE)
    return [*lines[:first], *(f"{ACTIVATE} && {line}" for line in lines[first + 1 :])]


def printed(output: str) -> list[str]:
    """The commands that `mctf demo` says to type next, with a stranger's files in place of the words for them."""
    _, _, following = output.partition("\nnext ")
    lines = [line.partition("#")[0].strip() for line in following.splitlines()]
    return [line.replace("PHOTO", "photo.jpg").replace("FOLDER", "photos") for line in lines if " " in line]


def strangers_environment() -> dict[str, str]:
    """This one without folders of programs that hold an mctf: the shell finds it only where a command says so.

    Nor what a make around it passes on, as make then prints the folders that it enters.
    """
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "mctf").exists()]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return own | {"PATH": os.pathsep.join(folders), "COLUMNS": "120"}


def run(command: str, *, folder: Path) -> str:
    """Output of one command in a folder, run as it is; its failure is raised with its output."""
    if command.endswith(SERVES):
        return ask(command, folder=folder)
    result = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=strangers_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode != 0:
        raise RuntimeError(f"{command} failed with exit code {result.returncode}:\n{result.stdout}")
    return result.stdout


def ask(command: str, *, folder: Path, seconds: float = 120) -> str:
    """The first line with an address that a server prints, once that address has answered; the server is ended."""
    log = folder / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            shell=True,
            cwd=folder,
            env=strangers_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        for _ in range(int(seconds / 0.2)):
            found = re.search(r"http://[\w.:]+\d", log.read_text())
            if found:
                with urllib.request.urlopen(found[0], timeout=30) as answer:
                    assert answer.status == 200
                return found[0]
            if server.poll() is not None:
                break
            time.sleep(0.2)
        raise RuntimeError(f"{command} printed no address:\n{log.read_text()}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)  # the shell and what it started
        server.wait()


def main() -> None:
    """The whole path: clone, install, every command, with the time that each takes."""
    with tempfile.TemporaryDirectory(prefix="five-minutes-") as temporary:
        clone = Path(temporary) / "mctf"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        pending = commands(PAGE.read_text())
        while pending:
            command, *pending = pending
            start = time.monotonic()
            output = run(command, folder=clone)
            print(f"$ {command}\n{output}\n({time.monotonic() - start:.0f} s)\n", flush=True)
            if command == DEMO:
                subprocess.run([str(clone / ".venv/bin/python"), "-c", COPY, str(clone)], check=True)
                pending = [*printed(output), *pending]


if __name__ == "__main__":
    sys.exit(main())
