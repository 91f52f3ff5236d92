"""Vectors of images by a fused model in Daft: python examples/embed_daft.py GLOB OUTPUT [MODEL]."""

import sys

import daft
from daft import DataType, Series

import mctf

DIMENSION = 192  # of "embedded"; mctf.Embedder(MODEL).dimension


@daft.cls
class Embed:
    """The model is loaded once per worker."""

    def __init__(self, model: str) -> None:
        self.embed = mctf.Embedder(model, flops=0.56, normalize=True, on_corrupt="skip")

    @daft.method.batch(return_dtype=DataType.embedding(DataType.float32(), DIMENSION))
    def __call__(self, images: Series) -> Series:
        return self.embed(images.to_pylist())


def main(pattern: str, output: str, model: str = "embedded") -> None:
    files = daft.from_glob_path(pattern)
    embed = Embed(model)
    files.select("path", embed(daft.functions.download(files["path"])).alias("embedding")).write_parquet(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
