"""One image through one model, unfused and fused in several ways: answers, cost, time, KL and pictures of every block.

Fused models share the weights of the unfused one and are kept, so that the next image costs only its passes.

Axes: 3 H W pixels of one image; K classes; N tokens.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor, nn

from .._utils import plural
from ..api import fuse, fused_stack
from ..data import Preprocessing
from ..errors import MctfError, did_you_mean
from ..evaluation.environment import describe_device
from ..evaluation.fidelity import kl_divergence
from ..evaluation.timing import Timing, time_interleaved, why_inconclusive
from ..hosts import find_host
from ..methods import make_method, methods
from ..models.class_names import class_labels
from ..models.loading import copy_sharing_weights
from ..planning import Plan, plan
from ..tracing import Trace, trace
from .fused_patches import enlarge, fused_picture, patch_grid, to_image

T = TypeVar("T")

ROUNDS = 3
UNFUSED = "unfused"
_WARMUP = 1
_TOP = 5
_SIDE = 448  # pixels of a picture's shorter side below which single patches are hard to see


@dataclass(frozen=True)
class Fusion:
    """A method and a budget. flops: share of the unfused model's FLOPs to keep."""

    method: str
    flops: float


@dataclass(frozen=True)
class Answer:
    """A class, its probability, and its probability under the unfused model."""

    label: str
    probability: float
    baseline: float


@dataclass(frozen=True)
class Result:
    """One model on one image.

    name: "unfused", or the method. gflops, share: the plan's account, and its share of the unfused model's.
    speedup: the unfused model's median time over this one's. agrees, kl: against the unfused model; None without a
    classifier.
    answers: the likeliest classes first. token_counts, frames: tokens and the picture after every block.
    """

    name: str
    gflops: float
    share: float
    timing: Timing
    speedup: float
    agrees: bool | None
    kl: float | None
    answers: tuple[Answer, ...]
    token_counts: tuple[int, ...]
    frames: tuple[Image.Image, ...]


@dataclass(frozen=True)
class Inspection:
    """The unfused model and the fused ones. conditions: of the times, in words. busy: why the times mean nothing."""

    baseline: Result
    fused: tuple[Result, ...]
    input_tokens: int
    conditions: str
    busy: str | None


def training_free() -> list[str]:
    """The methods that take a budget and need no training: those that an untrained page can show."""
    return [name for name in methods() if not (make_method(name, {}).learned or make_method(name, {}).adaptive)]


class _OneThread:
    """Calls of any thread, one after the other in a thread of their own. A program that ends does not wait for them."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        Thread(target=self._run, args=[self._calls], daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def call(self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._calls.put((function, future))
        return future.result()

    @staticmethod
    def _run(calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
        while (each := calls.get()) is not None:
            function, future = each
            try:
                future.set_result(function())
            except BaseException as error:  # raised by `call`
                future.set_exception(error)
            del each, function, future  # until the next call nothing is kept


class Inspector:
    """Models by name, and the fused copies that were asked for last.

    Calls from several threads run one after the other, in one thread. On a CPU every thread that runs operators of
    PyTorch has a pool of its own, and two pools slow each other down. So a model may be given as a function that loads
    it, which runs in that thread as well.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module | Callable[[], nn.Module]],
        *,
        device: torch.device,
        rounds: int = ROUNDS,
        kept: int = 16,
    ) -> None:
        if not models:
            raise MctfError("there is no model to inspect: give at least one")
        self.device = device
        self._rounds = rounds
        self._kept = kept
        self._fused: OrderedDict[tuple[str, Fusion], tuple[nn.Module, Plan]] = OrderedDict()
        self._thread = _OneThread()
        self.models = self._thread.call(partial(self._load, models))

    def _load(self, models: Mapping[str, nn.Module | Callable[[], nn.Module]]) -> dict[str, nn.Module]:
        loaded = {name: each if isinstance(each, nn.Module) else each() for name, each in models.items()}
        for model in loaded.values():
            find_host(model)  # refuses what cannot be fused before a page is served
        return {name: model.eval().to(self.device) for name, model in loaded.items()}

    def depth(self, model: str) -> int:
        return find_host(self._model(model)).depth

    def inspect(self, image: Image.Image, *, model: str, fusions: Sequence[Fusion], batch: int = 1) -> Inspection:
        """The unfused model and every fusion of it on one RGB image. batch: copies of the image in a timed pass."""
        return self._thread.call(partial(self._inspect, image, model, fusions, batch))

    def _inspect(self, image: Image.Image, model: str, fusions: Sequence[Fusion], batch: int) -> Inspection:
        with torch.inference_mode():
            baseline = self._model(model)
            fused = [self._fuse(model, fusion) for fusion in fusions]
            preprocessing = Preprocessing.of(baseline)
            weight = next(baseline.parameters())
            tensor = preprocessing.transform()(image)
            pixels = tensor[None].to(weight.device, weight.dtype)
            shown = to_image(tensor, preprocessing)
            outputs = [_Run(baseline(pixels), None), *(_run(each, pixels) for each, _ in fused)]
            copies = pixels.repeat(batch, 1, 1, 1)
            passes = [partial(each, copies) for each in (baseline, *(each for each, _ in fused))]
            forwards = dict(zip(map(str, range(len(passes))), passes, strict=True))  # a method may be there twice
            timings = list(time_interleaved(forwards, device=self.device, rounds=self._rounds, warmup=_WARMUP).values())
        labels = class_labels(baseline) if getattr(baseline, "num_classes", 0) else ()
        reference = outputs[0].logits
        own = plan(baseline, r=0)
        count, depth = own.image_tokens, self.depth(model)
        results = [
            Result(
                name=name,
                gflops=planned.gflops,
                share=planned.gflops / own.gflops,
                timing=timing,
                speedup=timings[0].median / timing.median,
                agrees=_agrees(run.logits, reference) if labels else None,
                kl=float(kl_divergence(reference, run.logits)) if labels else None,
                answers=_answers(run.logits, reference, labels) if labels else (),
                token_counts=tuple(run.trace.token_counts) if run.trace else (count,) * depth,
                frames=tuple(_frames(shown, run.trace, each, depth)),
            )
            for name, planned, each, run, timing in zip(
                (UNFUSED, *(fusion.method for fusion in fusions)),
                (own, *(planned for _, planned in fused)),
                (baseline, *(each for each, _ in fused)),
                outputs,
                timings,
                strict=True,
            )
        ]
        spread = max(timing.spread for timing in timings)
        rounds = plural(self._rounds, "interleaved pass", "interleaved passes")
        images = "one image" if batch == 1 else f"{batch} copies of the image"
        return Inspection(
            baseline=results[0],
            fused=tuple(results[1:]),
            input_tokens=count,
            conditions=f"median of {rounds} of {images} on this machine, {describe_device(self.device)}, "
            f"{str(weight.dtype).removeprefix('torch.')}, spread {spread:.0%}",
            busy=why_inconclusive(spread=spread, upper_bound=None),
        )

    def _model(self, name: str) -> nn.Module:
        if name not in self.models:
            raise MctfError(f"there is no model {name!r} here: {did_you_mean(str(name), self.models)}")
        return self.models[name]

    def _fuse(self, model: str, fusion: Fusion) -> tuple[nn.Module, Plan]:
        """The fused copy and its plan; the least recently used one makes room."""
        key = (model, fusion)
        if key not in self._fused:
            baseline, setting = self._model(model), {"method": fusion.method, "flops": fusion.flops}
            if fusion.method not in training_free():
                make_method(fusion.method, {})  # refuses an unknown name
                raise MctfError(f"{fusion.method} needs training: choose from {', '.join(training_free())}")
            planned = plan(baseline, **setting)  # type: ignore[arg-type]
            self._fused[key] = fuse(copy_sharing_weights(baseline), **setting), planned  # type: ignore[arg-type]
            while len(self._fused) > self._kept:
                self._fused.popitem(last=False)
        self._fused.move_to_end(key)
        return self._fused[key]


@dataclass(frozen=True)
class _Run:
    """logits: 1 K, float64 on the CPU. trace: None of an unfused model."""

    logits: Tensor
    trace: Trace | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "logits", self.logits.cpu().double())


def _run(model: nn.Module, pixels: Tensor) -> _Run:
    with trace(model) as traced:
        return _Run(model(pixels), traced)


def _agrees(logits: Tensor, reference: Tensor) -> bool:
    return int(logits.argmax()) == int(reference.argmax())


def _answers(logits: Tensor, reference: Tensor, labels: Sequence[str]) -> tuple[Answer, ...]:
    probabilities, before = (each[0].softmax(dim=0) for each in (logits, reference))
    likeliest = probabilities.topk(min(_TOP, len(labels))).indices.tolist()
    return tuple(Answer(labels[index], float(probabilities[index]), float(before[index])) for index in likeliest)


def _frames(image: Image.Image, traced: Trace | None, model: Any, depth: int) -> list[Image.Image]:
    """The picture after every block; blocks that fuse nothing share one."""
    scale = max(1, -(-_SIDE // min(image.size)))
    if traced is None:
        return [enlarge(image, scale)] * depth
    prefix = fused_stack(model).host.protected
    grid = patch_grid(traced.source_map().shape[1] - prefix, height=image.height, width=image.width)
    maps = [
        tuple(each[0, prefix:].cpu().numpy() for each in (traced.source_map(block), traced.dropped(block)))
        for block in range(depth)
    ]
    frames = [fused_picture(image, maps[0][0], grid=grid, dropped=maps[0][1], scale=scale)]
    for (before, _), (slots, dropped) in pairwise(maps):
        same = before.max() == slots.max() and len(set(before)) == len(set(slots))
        frames.append(frames[-1] if same else fused_picture(image, slots, grid=grid, dropped=dropped, scale=scale))
    return frames
