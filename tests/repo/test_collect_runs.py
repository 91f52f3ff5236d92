"""The script that collects several fine-tuning runs into one result."""

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "collect_runs.py"


@pytest.fixture
def script() -> dict:
    return runpy.run_path(str(SCRIPT))


def write_run(folder: Path, name: str, top1: float) -> None:
    rows = [{"r": r, "method": "mctf", "top1": top1 - r, "gflops": 1.0 - r / 100} for r in (0, 16)]
    facts = {"command": f"mctf finetune --output runs/{name}", "recipe": {"batch": 8}, "rows": rows}
    (folder / name).mkdir()
    (folder / name / "evaluation.json").write_text(json.dumps(facts))
    (folder / name / "log.csv").write_text("step,images_per_second\n10,40\n30,80\n")


def test_seeds_of_a_recipe_become_a_mean(tmp_path: Path, script: dict) -> None:
    for name, top1 in (("plain-0", 70.0), ("plain-1", 71.0), ("base", 60.0)):
        write_run(tmp_path, name, top1)
    runs = script["read_runs"](tmp_path)
    lines = script["table"](runs).splitlines()
    assert lines[2] == "| base model, off the shelf | 1 | 60.00 | 44.00 |"
    assert lines[3] == "| fine-tuned without fusion | 2 | 70.50 ± 0.71 | 54.50 ± 0.71 |"
    (drawn,) = (line for line in script["lines"](runs) if line.name == "fine-tuned without fusion")
    assert drawn.points == ((0.84, 54.5), (1.0, 70.5))


def test_time_is_that_of_the_steps(tmp_path: Path, script: dict) -> None:
    write_run(tmp_path, "base", 60.0)
    assert script["read_runs"](tmp_path)["base"][0]["training_seconds"] == 10 * 8 / 40 + 20 * 8 / 80


def test_everything_is_written(tmp_path: Path, script: dict) -> None:
    (tmp_path / "runs").mkdir()
    write_run(tmp_path / "runs", "consistency-0", 70.0)
    script["main"](tmp_path / "runs", tmp_path / "result")
    assert json.loads((tmp_path / "result.json").read_text())["runs"]["consistency"][0]["rows"][1]["top1"] == 54.0
    assert "MCTF, consistency" in (tmp_path / "result.md").read_text()
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
