"""Largest memory of an embedding job by the number of images: it does not grow with it.

    python benchmarks/embed_memory.py --images 10000,100000

Links to a few generated pictures stand for the images; the model is timm's smallest.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image


def largest_memory(command: list[str]) -> tuple[float, float]:
    """MiB at the most, and seconds, of a command that must succeed."""
    start = time.perf_counter()
    child = os.posix_spawn(command[0], command, os.environ)
    _, status, usage = os.wait4(child, 0)
    if status:
        sys.exit(f"failed: {command}")
    return usage.ru_maxrss / 1024, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", default="10000,100000")
    parser.add_argument("--shard-size", default="1024")
    options = parser.parse_args()
    for count in map(int, options.images.split(",")):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            rng = np.random.default_rng(0)
            for number in range(16):
                pixels = rng.integers(0, 256, (36, 36, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
            for number in range(count):
                place = folder / "images" / f"{number // 1000:04}"
                place.mkdir(parents=True, exist_ok=True)
                os.link(folder / f"{number % 16}.png", place / f"image_{number:07}.png")
            command = [sys.executable, "-m", "mctf", "embed", "test_vit", "--random-weights", "--image-size", "32"]
            command += ["--data", f"{folder}/images", "--output", f"{folder}/vectors", "--batch-size", "256"]
            memory, seconds = largest_memory([*command, "--shard-size", options.shard_size, "--threads", "1"])
            print(f"{count:,} images: {memory:,.0f} MiB at the most, {seconds:,.0f} s", flush=True)


if __name__ == "__main__":
    main()
