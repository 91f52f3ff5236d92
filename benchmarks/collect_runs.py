"""The runs of recipes/tiny_imagenet as one result: `python benchmarks/collect_runs.py RUNS OUTPUT`.

RUNS holds the output folders of `mctf finetune --output RUNS/NAME`, where NAME is that of the recipe, followed by
`-SEED` if there are several seeds, and `eval-NAME.json` files of `mctf eval --json`. OUTPUT.json gets every run with
its command, recipe and accuracy at each r; OUTPUT.md a table of means over seeds; OUTPUT.png the same over GFLOPs.
"""

import csv
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from mctf.cli.output import write_text
from mctf.viz.plots import Line, Panel, draw, write_plot

LABELS = {
    "base": "base model, off the shelf",
    "eval-base-exact": "base model, exact variant off the shelf",
    "eval-base-tome": "base model, ToMe off the shelf",
    "plain": "fine-tuned without fusion",
    "cross_entropy": "MCTF, cross-entropy",
    "consistency": "MCTF, consistency",
    "consistency_exact": "exact variant, consistency",
    "tome": "ToMe, cross-entropy",
}
STRONG = "consistency"

Runs = dict[str, list[dict[str, Any]]]


def read_runs(folder: Path) -> Runs:
    """Every finished run, under the name of its recipe."""
    runs: Runs = defaultdict(list)
    for path in sorted(folder.glob("*/evaluation.json")):
        facts = json.loads(path.read_text())
        name, _, seed = path.parent.name.rpartition("-")
        if not seed.isdigit():
            name = path.parent.name
        runs[name].append(
            {
                "name": path.parent.name,
                **{key: facts.get(key) for key in ("command", "device", "versions", "commit", "recipe", "rows")},
                "training_seconds": training_seconds(path.parent / "log.csv", facts["recipe"]["batch"]),
            }
        )
    for path in sorted(folder.glob("eval-*.json")):
        facts = json.loads(path.read_text())
        runs[path.stem].append({"name": path.stem, "command": facts["command"], "rows": facts["rows"]})
    return runs


def training_seconds(log: Path, batch: int) -> float:
    """Time of the steps, from the images/s in the log; without compilation, data loading and evaluation."""
    seconds, before = 0.0, 0
    for line in csv.DictReader(log.open()):
        step = int(line["step"])
        seconds += (step - before) * batch / float(line["images_per_second"])
        before = step
    return round(seconds, 1)


def table(runs: Runs) -> str:
    """Top-1 over r in Markdown: means over seeds, with the standard deviation of several."""
    steps = sorted({row["r"] for seeds in runs.values() for run in seeds for row in run["rows"]})
    lines = [
        "| | seeds | " + " | ".join(f"r={r}" for r in steps) + " |",
        "|---|---|" + "---|" * len(steps),
    ]
    for name, seeds in _in_order(runs):
        cells = [_cell([row["top1"] for run in seeds for row in run["rows"] if row["r"] == r]) for r in steps]
        lines.append(f"| {LABELS.get(name, name)} | {len(seeds)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def _in_order(runs: Runs) -> list[tuple[str, list[dict[str, Any]]]]:
    labeled = [name for name in LABELS if name in runs]
    return [(name, runs[name]) for name in (*labeled, *sorted(set(runs) - set(labeled)))]


def lines(runs: Runs) -> tuple[Line, ...]:
    """Mean top-1 over GFLOPs, one line per recipe."""
    drawn = []
    for name, seeds in _in_order(runs):
        points = defaultdict(list)
        for run in seeds:
            for row in run["rows"]:
                points[row["gflops"]].append(row["top1"])
        means = tuple((cost, statistics.mean(values)) for cost, values in sorted(points.items()))
        label = LABELS.get(name, name)
        drawn.append(Line(label, means, strong=name == STRONG, quiet="off the shelf" in label))
    return tuple(drawn)


def main(folder: Path, output: Path) -> None:
    runs = read_runs(folder)
    write_text(output.with_suffix(".json"), json.dumps({"runs": runs}, indent=2) + "\n")
    write_text(output.with_suffix(".md"), table(runs))
    figure = draw([Panel(lines(runs), "GFLOPs", "top-1 %")], title="Tiny-ImageNet-200 at 224 x 224, DeiT-Tiny")
    write_plot(figure, output.with_suffix(".png"))
    print(table(runs), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
