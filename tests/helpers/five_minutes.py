"""The commands of docs/index.md, run as a stranger would: `python -m helpers.five_minutes` clones the repository first.

The page's `sh` blocks are the script, so that page and script cannot diverge. `photo.jpg` and `photos`, which a
stranger brings along, are photographs of scikit-image. `mctf playground` serves until it is stopped: it is asked for
its page.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/index.md"
SERVES = "mctf playground"
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
    """The lines of the page's sh blocks, without the activation of the environment."""
    blocks = re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and line != ACTIVATE]


def run(command: str, *, folder: Path, bin: Path) -> str:
    """Output of one command in a folder, by the programs of an environment; its failure is raised with its output."""
    environment = os.environ | {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
    if command == SERVES:
        return ask(command, folder=folder, environment=environment)
    result = subprocess.run(
        command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode != 0:
        raise RuntimeError(f"{command} failed with exit code {result.returncode}:\n{result.stdout}")
    return result.stdout


def ask(command: str, *, folder: Path, environment: dict[str, str], seconds: float = 120) -> str:
    """The first line with an address that a server prints, once that address has answered; the server is ended."""
    log = folder / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            shlex.split(command), cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
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
        server.terminate()
        server.wait()


def main() -> None:
    """The whole path: clone, install, every command, with the time that each takes."""
    with tempfile.TemporaryDirectory(prefix="five-minutes-") as temporary:
        clone = Path(temporary) / "mctf"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        bin = clone / ".venv/bin"
        for command in commands(PAGE.read_text()):
            if not (clone / "photos").exists() and bin.exists():
                subprocess.run([str(bin / "python"), "-c", COPY, str(clone)], check=True)
            start = time.monotonic()
            print(f"$ {command}\n{run(command, folder=clone, bin=bin)}")
            print(f"({time.monotonic() - start:.0f} s)\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
