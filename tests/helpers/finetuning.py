"""A short `mctf finetune` with every option whose state a checkpoint must cover, and what it leaves behind."""

import csv
from pathlib import Path

from safetensors.torch import load_file


def arguments(place: Path, output: Path, *more: object, batch: int = 16) -> list[object]:
    """A run of 30 steps on the images in `place`/train."""
    tiny = ["test_vit", "--random-weights", "--image-size", 64, "-r", 2, "--batch", batch, "--device", "cpu"]
    course = ["--epochs", 5, "--lr", 1e-3, "--drop-path", 0.1, "--ema", 0.9, "--augmentation", "weak"]
    keeping = ["--data", place / "train", "--output", output, "--save-steps", 5, "--log-steps", 1]
    return [*tiny, *course, *keeping, *more]


def steps_logged(output: Path) -> int:
    path = output / "log.csv"
    return max(0, path.read_text().count("\n") - 1) if path.exists() else 0


def result(output: Path) -> tuple[dict[str, bytes], list[list[str]]]:
    """All weights as bytes, and the log without its times."""
    weights = {
        f"{name} {key}": value.numpy().tobytes()
        for name in ("model.safetensors", "model-raw.safetensors")
        for key, value in load_file(output / name).items()
    }
    with (output / "log.csv").open(newline="") as file:
        return weights, [row[:3] + row[4:] for row in csv.reader(file)]


def assert_same(actual: Path, expected: Path) -> None:
    """The same weights bit for bit, the same log line for line."""
    assert result(actual)[1] == result(expected)[1]
    assert result(actual)[0] == result(expected)[0]
