"""`mctf.Embedder`: images in, vectors out, by a fused model that each process loads for itself.

Axes: B images, 3 H W, D of the vector.
"""

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..api import find_stack, fuse
from ..core.schedule import ReductionSpec
from ..data import Preprocessing, ReadLimits
from ..data.decode import UnreadableError, decode_image
from ..errors import MctfError, is_out_of_memory, shown
from ..evaluation.environment import pick_device, set_threads
from ..hosts import find_host
from ..hosts.hf import holds_tower
from ..methods.base import check_bool, check_choice, check_whole
from ..models.hf_images import ImageModel, processor_config, read_preprocessing
from ..models.loading import copy_sharing_weights, load_described
from ..models.open_clip_images import OpenClipImages
from ..planning import FusionRequest, ScheduleSource, plan
from .names import read_location
from .vectors import VECTORS, Outputs, VectorReader, check_top_k, prefix_tokens, reads_every_token, resolve_vector

METHOD = "ward"  # closest to the unfused model at equal cost
VECTOR_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
DTYPES = ("float32", "bfloat16", "float16")
_COLUMNS = ("bytes", "image", "images", "path", "content")


@dataclass(frozen=True)
class Loaded:
    """A model on its device, ready to run. weights: a checksum of them. facts: of the fusion, for the manifest."""

    model: nn.Module
    read: Any
    preprocessing: Preprocessing
    device: torch.device
    weights: str
    facts: dict[str, Any]


class Embedder:
    """Vectors of images, by a model fused as `mctf.fuse` fuses it; by default `ward` with its own ratio.

        embed = mctf.Embedder("deit_small_patch16_224", flops=0.56, normalize=True)
        vectors = embed(["cat.jpg", "dog.jpg"])        # float32, 2 D

    model: a name as of `mctf embed`, or a model of timm, open_clip or transformers, of which a copy is taken; one that
        is fused stays as it is. processor: the image processor of a model of transformers.
    weights: a file. random_weights: none. r=0: the unfused model. options: of the method.
    vector: "auto" (the projection of CLIP, else what the model's head reads), "class", "mean" (of patches),
        "attention", "projection" or "logits". normalize: to length 1. vector_dtype: "fp32" or "fp16".
    dtype: of the model. batch_size: images per pass. compile: one CUDA graph per pass, by torch.compile.
    limits: what one image may cost. on_corrupt: "stop" raises MctfError for an unreadable image, "skip" gives a row of
        nan, and -1 for its classes. threads: of the CPU.

    The model is loaded when it is first used, by each process for itself: an Embedder made from a name is a few hundred
    bytes when pickled. Calls take a list of bytes, paths, PIL images or arrays (H W 3, uint8), or an array of B H W 3;
    or a dict of columns, as Ray Data and Daft pass them, and return its other columns with "embedding".
    """

    def __init__(
        self,
        model: str | nn.Module,
        *,
        processor: Any = None,
        weights: str | PathLike[str] | None = None,
        random_weights: bool = False,
        method: str | None = None,
        r: ReductionSpec | None = None,
        flops: float | None = None,
        blocks: Iterable[int] | None = None,
        schedule: ScheduleSource | None = None,
        options: Mapping[str, object] | None = None,
        vector: str = "auto",
        normalize: bool = False,
        vector_dtype: str = "fp32",
        top_k: int = 0,
        image_size: tuple[int, int] | None = None,
        crop_pct: float | None = None,
        dtype: str = "float32",
        device: str | None = None,
        batch_size: int = 32,
        compile: bool = False,
        limits: ReadLimits | None = None,
        on_corrupt: str = "stop",
        threads: int | None = None,
    ) -> None:
        check_choice(vector=(vector, VECTORS), vector_dtype=(vector_dtype, tuple(VECTOR_DTYPES)), dtype=(dtype, DTYPES))
        check_choice(on_corrupt=(on_corrupt, ("stop", "skip")))
        check_bool(normalize=normalize, compile=compile, random_weights=random_weights)
        check_whole(1, batch_size=batch_size)
        check_whole(0, top_k=top_k)
        given = {"method": method, "r": r, "flops": flops, "blocks": blocks, "schedule": schedule, **(options or {})}
        if schedule is None and method is None:
            method = METHOD
        request = FusionRequest.of(method, r=r, flops=flops, blocks=blocks, schedule=schedule, options=options or {})
        if compile and request.method.adaptive:
            raise MctfError(f"{request.method.name} keeps as many tokens as each image needs: leave out compile")
        if not isinstance(model, (str, nn.Module)):
            raise MctfError(f"model={shown(model)} is neither a name nor a model")
        if processor is not None and (isinstance(model, str) or not holds_tower(model)):
            raise MctfError("processor belongs to a model of transformers that is passed as an object: leave it out")
        if isinstance(model, nn.Module):
            model = _image_model(model, processor)
            _check_unfused(model, [name for name, value in given.items() if value is not None])
        self.model = model
        self.weights = None if weights is None else Path(weights)
        self.random_weights = random_weights
        self.fusion: dict[str, Any] = {
            "method": method,
            "r": r,
            "flops": flops,
            "blocks": None if blocks is None else tuple(blocks),
            "schedule": request.schedule,
            **(options or {}),
        }
        self.vector, self.normalize, self.vector_dtype, self.top_k = vector, normalize, vector_dtype, top_k
        self.image_size, self.crop_pct = image_size, crop_pct
        self.dtype, self.device_name, self.batch_size, self.compile = dtype, device, batch_size, compile
        self.limits, self.on_corrupt, self.threads = limits or ReadLimits(), on_corrupt, threads
        self._loaded: Loaded | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        name = self.model if isinstance(self.model, str) else type(self.model).__name__
        return f"Embedder({name!r}, vector={self.vector!r})"

    @property
    def loaded(self) -> Loaded:
        """The model, loaded at the first call."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    @property
    def dimension(self) -> int:
        """D."""
        return self.loaded.facts["dimension"]

    @property
    def transform(self) -> Any:
        """From a PIL image to 3 H W uint8, which the device normalizes."""
        return self.loaded.preprocessing.transform(normalize=False)

    def __call__(self, batch: Any) -> Any:
        """Vectors, B D; for a dict of columns a dict, see the class."""
        if isinstance(batch, Mapping):
            column = next((name for name in _COLUMNS if name in batch), None)
            if column is None:
                raise MctfError(
                    f"the batch has the columns {', '.join(map(str, batch))}: name one {', '.join(_COLUMNS)}"
                )
            outputs = self._embed(list(batch[column]))
            kept = {name: value for name, value in batch.items() if name != column or column == "path"}
            kept["embedding"] = outputs[0]
            if self.top_k:
                kept["top_probabilities"], kept["top_classes"] = outputs[1:]
            return kept
        if isinstance(batch, (str, bytes, Image.Image)):
            raise MctfError("expected a list of images: put the image into a list, as in embed([image])")
        return self._embed(list(batch))[0]

    def _embed(self, images: Sequence[Any]) -> tuple[np.ndarray[Any, Any], ...]:
        transform, pixels, unreadable = self.transform, [], []
        height, width = self.loaded.preprocessing.image_size
        for index, image in enumerate(images):
            try:
                pixels.append(transform(_decode(image, index, self.limits)))
            except MctfError:
                if self.on_corrupt == "stop":
                    raise
                pixels.append(torch.zeros(3, height, width, dtype=torch.uint8))
                unreadable.append(index)
        chunks = [self.run(torch.stack(part)) for part in _chunked(pixels, self.batch_size)]
        if not chunks:
            return self._empty()
        arrays = tuple(np.concatenate([part.cpu().numpy() for part in parts]) for parts in zip(*chunks, strict=True))
        if unreadable:
            for array in arrays:
                array[unreadable] = np.nan if array.dtype.kind == "f" else -1  # -1: no class
        return arrays

    def _empty(self) -> tuple[np.ndarray[Any, Any], ...]:
        vectors = np.zeros((0, self.dimension), np.dtype(f"float{self.vector_dtype[2:]}"))
        tops = np.zeros((0, self.top_k), np.float32), np.zeros((0, self.top_k), np.int64)
        return (vectors, *tops) if self.top_k else (vectors,)

    def run(self, pixels: Tensor, *, pad: bool = False) -> Outputs:
        """Vectors on the device of images as uint8, at most a batch: B 3 H W -> B D, and top-k where it is asked for.

        pad: run a batch of full size, so that every pass has one shape; a compiled model always does.
        """
        loaded, count = self.loaded, len(pixels)
        # Padded outside of inference mode: compiled code takes tensors that were made in it for a second kind of input.
        pixels = pixels.to(loaded.device, non_blocking=True)
        if (pad or self.compile) and count < self.batch_size:
            rest = pixels.new_zeros(self.batch_size - count, *pixels.shape[1:])
            pixels = torch.cat((pixels, rest))
        try:
            if self.compile and loaded.device.type == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            with torch.inference_mode():
                outputs = loaded.read(pixels)
                if len(outputs[0]) != len(pixels):
                    raise MctfError(
                        f"the model gives {len(outputs[0])} vectors for {len(pixels)} images: use one that gives "
                        "one per image"
                    )
                if self.compile and loaded.device.type == "cuda":  # the next replay of the graph overwrites its outputs
                    return tuple(output[:count].clone() for output in outputs)
                return tuple(output[:count] for output in outputs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise MctfError(
                f"{loaded.device} has too little memory for batches of {self.batch_size}: lower the batch size"
            ) from None

    def _load(self) -> Loaded:
        set_threads(self.threads)
        device, dtype = pick_device(self.device_name), getattr(torch, self.dtype)
        model = self._load_model(device, dtype)
        kind = resolve_vector(model, self.vector)
        check_top_k(model, self.top_k)
        weights = _digest(model)
        if find_stack(model) is None and self.fusion["r"] != 0:
            fuse(model, dense=reads_every_token(kind), **self.fusion)
        facts = _fusion_facts(model)
        preprocessing = Preprocessing.of(model, crop_pct=self.crop_pct)
        try:
            model = model.eval().to(device, dtype)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise MctfError(f"{device} has too little memory for the model: choose another device") from None
        read = VectorReader(
            model, kind, prefix_tokens(model), self.normalize, VECTOR_DTYPES[self.vector_dtype], self.top_k
        )
        mean, std = (
            torch.tensor(each, device=device).view(3, 1, 1) for each in (preprocessing.mean, preprocessing.std)
        )
        run: Any = partial(_normalized, read, mean, std, dtype)
        if self.compile:
            run = torch.compile(run, dynamic=False, mode="reduce-overhead" if device.type == "cuda" else None)
        facts |= {
            "vector": kind,
            "dimension": _dimension(read, preprocessing, device, dtype),
        }
        return Loaded(model, run, preprocessing, device, weights, facts)

    def _load_model(self, device: torch.device, dtype: torch.dtype) -> Any:
        if isinstance(self.model, nn.Module):
            tensors = chain(self.model.parameters(), self.model.buffers())
            stays = all(each.device == device and each.dtype in (dtype, torch.long) for each in tensors)
            return copy_sharing_weights(self.model) if stays else copy.deepcopy(self.model)
        if self.model.startswith("hf:") and not self.random_weights and self.weights is None:
            from ..models.loading import load_model

            return load_model(self.model, image_size=self.image_size, keep_projection=True)
        loaded, _ = load_described(
            self.model, weights=self.weights, random=self.random_weights, image_size=self.image_size
        )
        return loaded


def _image_model(model: nn.Module, processor: Any) -> nn.Module:
    """A model with timm's methods around the same weights; raises MctfError for one that cannot have them."""
    name = f"{type(model).__module__}.{type(model).__name__}"
    if isinstance(model, (ImageModel, OpenClipImages)):
        return model
    if holds_tower(model):
        find_host(model)  # raises MctfError where it cannot be fused
        if processor is None:
            raise MctfError(
                f"{name} does not say how images are prepared: pass processor=AutoImageProcessor.from_pretrained(NAME) "
                "too, or the name of the model as hf:NAME instead"
            )
        preprocessing = read_preprocessing(processor_config(processor))
        return ImageModel.of(model, preprocessing, keep_projection=True).train(model.training)
    if type(model).__module__.startswith("open_clip."):
        return OpenClipImages.of(model).train(model.training)
    if not (hasattr(model, "forward_features") and hasattr(model, "forward_head")):
        find_host(model)
        raise MctfError(
            f"{name} has no forward_features and forward_head, from which vectors are read: pass a model of timm, "
            "open_clip or transformers, or a name"
        )
    return model


def _check_unfused(model: nn.Module, settings: list[str]) -> None:
    """Raise MctfError for settings of the fusion where the model is fused already."""
    if settings and find_stack(model) is not None:
        name = type(getattr(model, "model", getattr(model, "visual", model))).__name__
        raise MctfError(f"this {name} is fused already: leave out {', '.join(settings)}, or mctf.unfuse(model) first")


def _normalized(read: VectorReader, mean: Tensor, std: Tensor, dtype: torch.dtype, pixels: Tensor) -> Outputs:
    """What `read` gives for images of 8 bits: scaled and normalized in float32, as the transforms on the CPU do."""
    return read(pixels.float().div(255).sub(mean).div(std).to(dtype))


@torch.inference_mode()
def _dimension(read: VectorReader, preprocessing: Preprocessing, device: torch.device, dtype: torch.dtype) -> int:
    return read(torch.zeros(1, 3, *preprocessing.image_size, device=device, dtype=dtype))[0].shape[1]


def _fusion_facts(model: nn.Module) -> dict[str, Any]:
    """Method, its options, resolved schedule and cost of a model, fused or not."""
    stack, host = find_stack(model), find_host(model)
    architecture = host.architecture(Preprocessing.of(model).image_size)
    if stack is None:
        planned = plan(model, r=0, architecture=architecture)
        return {"method": None, "method_options": {}, "schedule": None, "gflops": planned.gflops_base} | {
            "gflops_base": planned.gflops_base
        }
    options = {field.name: getattr(stack.method, field.name) for field in fields(stack.method)}  # type: ignore[arg-type]
    planned = plan(
        model,
        method=stack.method.name,
        r=stack.schedule,
        architecture=architecture,
        trim_last=stack.trim_last,
        dense=stack.dense,
        **options,
    )
    return {
        "method": stack.method.name,
        "method_options": {**options, "dense": stack.dense, "restore": stack.restore},
        "schedule": list(stack.schedule),
        "gflops": planned.gflops,
        "gflops_base": planned.gflops_base,
    }


def _digest(model: nn.Module) -> str:
    """A checksum of names and values of all parameters and buffers."""
    checksum = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        checksum.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        checksum.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return checksum.hexdigest()


def _decode(image: Any, index: int, limits: ReadLimits) -> Image.Image:
    """One image in RGB; raises MctfError with its path or index."""
    name = str(image) if isinstance(image, (str, PathLike)) else f"image {index}"

    def content() -> bytes | Image.Image:
        if isinstance(image, (str, PathLike)):
            return read_location(str(image), limits)
        if isinstance(image, dict):  # as Hugging Face writes images
            return image.get("bytes") or read_location(str(image.get("path")), limits)
        if isinstance(image, (bytes, bytearray, memoryview, Image.Image)):
            return image if isinstance(image, Image.Image) else bytes(image)
        array = np.asarray(image)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
            raise UnreadableError(
                f"it is an array of {array.dtype} and shape {array.shape}", "expected height x width x 3, uint8"
            )
        return Image.fromarray(array)

    return decode_image(content, name=name, limits=limits)


def _chunked(pixels: list[Tensor], size: int) -> list[list[Tensor]]:
    return [pixels[start : start + size] for start in range(0, len(pixels), size)]
