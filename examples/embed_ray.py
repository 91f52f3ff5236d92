"""Vectors of images by a fused model in Ray Data: python examples/embed_ray.py FOLDER OUTPUT [MODEL]."""

import sys

import ray

import mctf


def main(folder: str, output: str, model: str = "embedded") -> None:
    images = ray.data.read_binary_files(folder, include_paths=True)  # columns bytes and path
    vectors = images.map_batches(
        mctf.Embedder,
        fn_constructor_args=(model,),
        fn_constructor_kwargs={"flops": 0.56, "normalize": True, "on_corrupt": "skip"},
        batch_size=64,
        concurrency=1,  # actors; with num_gpus=1 each gets a GPU
        num_cpus=1,
    )
    vectors.write_parquet(output)  # columns path and embedding


if __name__ == "__main__":
    main(*sys.argv[1:])
