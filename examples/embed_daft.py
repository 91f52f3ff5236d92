"""Vectors of images by a fused model in Daft: python examples/embed_daft.py GLOB OUTPUT [MODEL]."""

import sys

import daft
from daft import DataType, Series

import mctf


def main(pattern: str, output: str, model: str = "embedded") -> None:
    embedder = mctf.Embedder(model, flops=0.56, normalize=True, on_corrupt="skip")
    vectors = DataType.embedding(DataType.float32(), embedder.dimension)

    @daft.cls
    class Embed:
        """A worker loads the model when it is first used, and once."""

        def __init__(self) -> None:
            self.embed = embedder

        @daft.method.batch(return_dtype=vectors)
        def __call__(self, images: Series) -> Series:
            return self.embed(images.to_pylist())

    files = daft.from_glob_path(pattern)
    files.select("path", Embed()(daft.functions.download(files["path"])).alias("embedding")).write_parquet(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
