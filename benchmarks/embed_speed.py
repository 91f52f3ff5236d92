"""How fast an embedding job is on a GPU, and what bounds it: the model alone, images in memory, JPEG files.

    python benchmarks/embed_speed.py [--output embed_speed.json]

ViT-L at 224 with random weights, bfloat16, batch 256, compiled with CUDA graphs, unfused and by ward at 56 % of the
FLOPs. All rows of a model run the same compiled graph:

    model    the passes of one batch that lies on the GPU
    memory   decoded images (uint8) in the memory of the host, through the pipeline of a job, vectors written as npy
    cpu      JPEG files decoded by loader processes
    gpu      JPEG files read by loader processes and decoded by the GPU
    varied   the same, of files of 256 sizes: the GPU resizes images of one size together

The other JPEG files have 500 x 375 and 7 other sizes as those of ImageNet. All are generated, quality 90. A few minutes
on an H200 with 16 CPU cores; needs neither pyarrow nor a network.
"""

import argparse
import io
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

import mctf
from mctf.data.resources import num_workers
from mctf.embedding.gpu_decode import check_gpu_decoding
from mctf.embedding.names import CompactNames
from mctf.embedding.pipeline import Clock, LoadedBatch, Pipeline
from mctf.embedding.sources import Files, Item, Shard, Source
from mctf.errors import MctfError
from mctf.evaluation.environment import commit, describe_device, versions

SIZES = [(500, 375), (375, 500), (500, 333), (333, 500), (500, 500), (640, 480), (480, 360), (400, 300)]
VARIED = [(320 + 37 * number % 320, 240 + 61 * number % 240) for number in range(256)]


def write_images(folder: Path, count: int, sizes: list[tuple[int, int]]) -> Source:
    """`count` files; one picture per size, as decoding costs the same for all of them."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    encoded = []
    for width, height in sizes:
        coarse = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
        noise = rng.integers(-12, 13, (height, width, 3))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
        buffer = io.BytesIO()
        Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
        encoded.append(buffer.getvalue())
    print(f"{count} JPEG files of {np.mean([len(each) for each in encoded]) / 1024:.0f} KiB on average", flush=True)
    for number in range(count):
        (folder / f"{number:06}.jpg").write_bytes(encoded[number % len(encoded)])
    names = CompactNames(sorted(path.name for path in folder.iterdir()))
    return Source("images", (Files("images", f"{folder}/", names),))


def model_speed(embed: mctf.Embedder, seconds: float) -> float:
    """images/s of passes one after another on the same batch."""
    pixels = torch.randint(0, 256, (embed.batch_size, 3, 224, 224), dtype=torch.uint8, device=embed.loaded.device)
    for _ in range(4):
        embed.run(pixels)
    torch.cuda.synchronize()
    times, begin = [], time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        for _ in range(5):
            embed.run(pixels)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 5)
    return embed.batch_size / median(times)


class Meter:
    """Writes vectors as a job does; images/s from the second on, when loader processes have started."""

    def __init__(self, folder: Path, warm: int) -> None:
        self.file, self.warm, self.clock = (folder / "vectors").open("wb"), warm, Clock()

    def run(self, results: Any) -> dict[str, Any]:
        images, start = 0, time.perf_counter()
        for batches, result in enumerate(results, start=1):
            before = time.perf_counter()
            self.file.write(result.arrays[0].tobytes())
            self.clock.disk += time.perf_counter() - before
            if batches == self.warm:
                images, start = 0, time.perf_counter()
                self.clock.decoding = self.clock.model = self.clock.disk = 0.0
            else:
                images += len(result.keys)
        self.file.flush()
        os.fsync(self.file.fileno())
        speed = images / (time.perf_counter() - start)
        return {"images_per_second": speed, "bound": self.clock.bound, **self.clock.shares()}


def in_memory(embed: mctf.Embedder, batches: int) -> Iterator[LoadedBatch]:
    """Decoded images, pinned, as the loader hands them over."""
    size = embed.batch_size
    stock = [torch.randint(0, 256, (size, 3, 224, 224), dtype=torch.uint8).pin_memory() for _ in range(4)]
    names = [str(number) for number in range(size)]
    for number in range(batches):
        yield LoadedBatch(names, names, stock[number % 4], list(range(size)), None, [], [], [])


def cut(source: Source, size: int, count: int) -> Iterator[list[Item]]:
    items = source.items(Shard(0, 0, count // size * size))
    while batch := [item for _, item in zip(range(size), items, strict=False)]:
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_large_patch16_224")
    parser.add_argument("--flops", type=float, default=0.56)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--images", type=int, default=20480)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    begin = time.perf_counter()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_images(folder / "images", options.images, SIZES)
        varied = write_images(folder / "varied", options.images, VARIED)
        workers = num_workers(10**9, device=torch.device("cuda"), requested=options.workers)
        for label, amount in (("unfused", {"r": 0}), ("ward", {"flops": options.flops})):
            start = time.perf_counter()
            embed = mctf.Embedder(
                options.model,
                random_weights=True,
                dtype="bfloat16",
                batch_size=options.batch,
                compile=not options.no_compile,
                device="cuda",
                vector_dtype="fp16",
                **amount,
            )
            embed.run(torch.zeros(options.batch, 3, 224, 224, dtype=torch.uint8))
            print(f"{label}: ready after {time.perf_counter() - start:.0f} s", flush=True)
            rows[f"{label}, model"] = {"images_per_second": model_speed(embed, 4.0), "bound": "model"}
            meter = Meter(folder, 8)
            pipeline = Pipeline(embed, source, workers)
            rows[f"{label}, memory"] = meter.run(pipeline._on_gpu(in_memory(embed, 120), meter.clock))
            kinds = {"cpu": source, "gpu": source, "varied": varied}
            try:
                check_gpu_decoding(torch.device("cuda"))
            except MctfError as error:
                print(f"rows gpu and varied left out: {error}")
                kinds = {"cpu": source}
            for kind, images in kinds.items():
                meter = Meter(folder, 2 * workers if kind == "cpu" else 8)
                pipeline = Pipeline(embed, images, workers, "cpu" if kind == "cpu" else "gpu")
                batches = cut(images, options.batch, options.images)
                rows[f"{label}, {kind}"] = meter.run(pipeline.run(batches, meter.clock))
            del embed, pipeline
            torch.compiler.reset()
            torch.cuda.empty_cache()
    print(f"\n{'':18}{'images/s':>10}{'of model':>10}{'over unfused':>14}  bound")
    for name, row in rows.items():
        label, kind = name.split(", ")
        row["of_model"] = row["images_per_second"] / rows[f"{label}, model"]["images_per_second"]
        row["over_unfused"] = row["images_per_second"] / rows[f"unfused, {kind}"]["images_per_second"]
        speed, share, gain = f"{row['images_per_second']:,.0f}", f"{row['of_model']:.1%}", f"{row['over_unfused']:.2f}x"
        print(f"{name:18}{speed:>10}{share:>10}{gain:>14}  {row['bound']}")
    facts = {
        "model": options.model,
        "flops": options.flops,
        "batch": options.batch,
        "compiled": not options.no_compile,
        "workers": workers,
        "cores": len(os.sched_getaffinity(0)),
        "device": describe_device(torch.device("cuda")),
        "versions": versions(),
        "commit": commit(),
        "seconds": time.perf_counter() - begin,
        "rows": rows,
    }
    print(f"{facts['seconds']:.0f} s")
    if options.output is not None:
        options.output.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
