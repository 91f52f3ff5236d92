"""Exported files as callables: `load_exported`."""

from os import PathLike
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from .._utils import first_line, plural
from ..errors import MctfError, is_out_of_memory, shown
from ..methods.base import check_whole
from .formats import SUFFIXES, Format, Run, format_of, quiet
from .metadata import ExportMetadata

Images = TypeVar("Images", Tensor, np.ndarray)


class ExportedModel:
    """An exported file: images (B 3 H W, preprocessed) in, logits or embeddings (B K) out, both float32.

    A tensor gives a tensor, a numpy array gives an array. metadata: what the file says about itself.
    """

    def __init__(self, run: Run, metadata: ExportMetadata, path: Path) -> None:
        self._run = run
        self.metadata = metadata
        self.path = path

    def __call__(self, images: Images) -> Images:
        if not isinstance(images, (Tensor, np.ndarray)):
            raise MctfError(
                f"{self.path.name} takes a tensor or an array of images, B x 3 x H x W, got {shown(images)}"
            )
        try:
            given = images if isinstance(images, Tensor) else torch.from_numpy(np.ascontiguousarray(images))
        except TypeError as failure:  # an array of text or of objects
            raise MctfError(f"{self.path.name} takes images of numbers ({first_line(failure)[:100]})") from None
        self._check(given)
        with torch.inference_mode():
            try:
                result = self._run(given.to("cpu", torch.float32).contiguous())
            except Exception as failure:  # every runtime has classes of its own
                if is_out_of_memory(failure):
                    raise
                raise MctfError(
                    f"{self.path.name} does not run ({first_line(failure)[:200]}): export it again"
                ) from failure
        classes = len(self.metadata.class_names)
        if result.dim() != 2 or (classes and result.shape[1] != classes):
            raise MctfError(
                f"{self.path.name} gives {' x '.join(map(str, result.shape))} outputs, and its metadata names "
                f"{plural(classes, 'class', 'classes')}: export the model again"
            )
        if isinstance(images, Tensor):
            return result.to(images.device)
        return result.numpy()

    def _check(self, images: Tensor) -> None:
        height, width = self.metadata.image_size
        batch = self.metadata.batch
        if images.dim() != 4 or images.shape[1:] != (3, height, width) or len(images) not in (batch or len(images),):
            expected = f"{batch or 'B'} x 3 x {height} x {width}"
            raise MctfError(f"{self.path.name} takes images of {expected}, got {' x '.join(map(str, images.shape))}")

    def __repr__(self) -> str:
        facts = self.metadata
        return f"ExportedModel({self.path.name!r}: {facts.model}, {facts.method or 'unfused'}, {facts.format})"


def load_exported(path: str | PathLike[str], *, threads: int | None = None) -> ExportedModel:
    """The callable behind a file that `mctf.export` wrote. It runs on the CPU. threads: those of torch by
    default, and always for .pt2 files.

    A .pt2 file is a program: one of AOTInductor holds compiled code, and torch evaluates expressions in one of
    torch.export. Load those that you trust. Python objects in the latter are refused.
    """
    if not isinstance(path, (str, PathLike)):
        raise MctfError(f"path={shown(path)} is no file name: pass the path of an exported file")
    file = Path(path)
    try:
        exists = file.is_file()
    except (OSError, ValueError):  # a name that no file system takes
        exists = False
    if threads is not None:
        check_whole(1, threads=threads)
    if not exists:
        raise MctfError(f"there is no file {shown(str(file))}: write it with mctf.export or mctf export")
    kind = format_of(file)
    if kind is None:
        raise MctfError(f"{file} is no exported file: its name should end in {', '.join(SUFFIXES)}")
    kind.check_packages()
    if threads not in (None, torch.get_num_threads()) and kind.suffix == ".pt2":
        raise MctfError(f"{kind.name} files run on the threads of torch: call torch.set_num_threads({threads})")
    run, metadata = open_file(kind, file, threads)
    return ExportedModel(run, ExportMetadata.from_json(metadata, file), file)


def open_file(kind: Format, path: Path, threads: int | None = None) -> tuple[Run, str | None]:
    """The function in a file and its metadata; raises MctfError where the runtime cannot load it."""
    try:
        with quiet():
            return kind.load(path, threads)
    except Exception as failure:  # every runtime has classes of its own
        raise MctfError(
            f"{path.name} cannot be loaded as {kind.name} ({first_line(failure)[:200]}): export the model again"
        ) from failure


def is_exported(name: str) -> bool:
    """Whether a model's name is an exported file: by its suffix, as no model's name ends so."""
    return Path(name).suffix in SUFFIXES and not name.startswith("hf:")
