"""What a benchmark found, and what is to be said of it in words."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ..api import fuse
from ..core.schedule import ReductionSpec
from ..errors import MctfError, did_you_mean
from ..hosts.patch_embed import MatmulPatchEmbed
from ..kernels import plain_operations
from ..methods import make_method
from ..models.loading import copy_sharing_weights
from ..planning import plan
from .timing import DISTURBED, STEADY, Timing, measure, synchronize

PLAIN = "plain"
CEILING = "free_drop"
_BOUND = 0.9  # a device that has been given its work so late in a pass has waited for it


@dataclass(frozen=True)
class Result:
    """One contender: medians over rounds, spread as a share of the median, memory in MiB where known.

    launch_milliseconds: what the host takes to queue a pass on a device that works meanwhile; None on a CPU.
    """

    name: str
    r: ReductionSpec
    batch: int
    milliseconds: float
    spread: float
    images_per_second: float
    speedup: float
    gflops: float
    peak_mib: float | None
    launch_milliseconds: float | None
    difference: float | None

    @property
    def bound_by_launches(self) -> bool:
        """Whether the device waits for the host rather than the host for the device."""
        return self.launch_milliseconds is not None and self.launch_milliseconds > _BOUND * self.milliseconds


def verdicts(results: Sequence[Result]) -> list[str]:
    """For every fused contender that it does not pay, or its distance to the ceiling; and whether to trust all this."""
    ceiling = next((each for each in results if each.name == CEILING), None)
    fused = [each for each in results if each.name != PLAIN and not each.name.startswith(CEILING)]
    lines = [_gain(each, ceiling) for each in fused]
    bound = [each.name for each in fused if each.bound_by_launches]
    if bound:
        lines.append(
            f"bound by the host, which launches more slowly than the GPU computes: {', '.join(bound)}; "
            "--compile --mode reduce-overhead, or a larger batch, shows what the GPU gains"
        )
    if any(each.spread > STEADY for each in results):
        lines.append(DISTURBED)
    return lines


def _gain(fused: Result, ceiling: Result | None) -> str:
    if fused.speedup < 1:
        return f"{fused.name} r={fused.r} does not pay here: {fused.speedup:.2f} times the plain model's speed"
    gain = f"{fused.name} r={fused.r}: {fused.speedup:.2f}x"
    if ceiling is None:
        return gain
    behind = fused.milliseconds / ceiling.milliseconds - 1
    side = "slower" if behind >= 0 else "faster"  # ToMe also fuses in the first block
    return f"{gain}, {abs(behind):.0%} {side} than dropping for nothing"


# MERGED from mctf.evaluation.benchmark:
# Fused models against the clock: plain, fused, and tokens dropped for nothing, all in one run.
#
# Correctness comes first: a fused model whose fast operations disagree with the plain ones is not timed. Every
# contender shares the weights. Tokens dropped for nothing are measured with the model's own patch embedding and with
# the matrix product that fused models use on a GPU: the first says what a free method could gain over the plain
# model, the second what matching and pooling cost.

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
_CHECKED_IMAGES = 4


@dataclass(frozen=True)
class Contest:
    """What is timed: methods with one r, at one batch and image size."""

    methods: tuple[str, ...]
    r: ReductionSpec
    batch: int
    image_size: tuple[int, int]
    compiled: str | None = None  # None for eager, else the mode of torch.compile
    rounds: int = 7
    training: torch.dtype | None = None  # forward and backward under autocast to this dtype; None for forward alone

    def __post_init__(self) -> None:
        if self.compiled is not None and self.compiled not in (modes := torch._inductor.list_mode_options()):
            raise MctfError(f"{self.compiled!r} is no mode of torch.compile: {did_you_mean(self.compiled, modes)}")

    @property
    def replays_graphs(self) -> bool:
        """Whether a pass is the replay of a CUDA graph."""
        return self.compiled is not None and "triton.cudagraphs" in torch._inductor.list_mode_options(self.compiled)


def benchmark(model: nn.Module, contest: Contest, *, tick: Callable[[], object] = lambda: None) -> tuple[Result, ...]:
    """Time the plain model and every contender on random images, interleaved; `tick` is called after each step."""
    if contest.compiled is None:
        return _benchmark(model, contest, tick)
    for name in contest.methods:
        if make_method(name, {}).adaptive:
            raise MctfError(
                f"{name} keeps as many tokens as each image needs, which no graph can know: leave out --compile"
            )
    torch.compiler.reset()
    # contenders share the code of their class, and torch.compile keeps only so many versions of one code
    with torch._dynamo.config.patch(recompile_limit=4 * (len(contest.methods) + 3)):
        return _benchmark(model, contest, tick)


def _benchmark(model: nn.Module, contest: Contest, tick: Callable[[], object]) -> tuple[Result, ...]:
    weight = next(model.parameters())
    height, width = contest.image_size
    channels = getattr(model, "in_chans", 3)
    images = torch.randn(contest.batch, channels, height, width, device=weight.device).to(weight.dtype)
    models = dict(_contenders(model, contest))
    runs = {name: _pass(made, contest) for name, made in models.items()}
    differences = {
        name: check(made, images, name, run=runs[name] if contest.training is None else None)
        for name, made in models.items()
        if name != PLAIN and not name.startswith(CEILING)
    }
    passes = {name: partial(run, images) for name, run in runs.items()}
    seen: dict[str, dict[str, float | None]] = {}
    for name, once in passes.items():
        with torch.inference_mode(contest.training is None):
            peak = _peak(once, weight.device)
            # a graph has memory of its own, which is not counted
            seen[name] = {"difference": differences.get(name), "peak_mib": None if contest.replays_graphs else peak}
        tick()
    timing = partial(measure, device=weight.device, gradient=contest.training is not None)
    repeats = _repeats(timing({PLAIN: passes[PLAIN]}, rounds=3, warmup=1)[PLAIN])
    times = timing(
        {name: partial(_repeat, once, repeats) for name, once in passes.items()},
        rounds=contest.rounds,
        settle=True,
        after_round=tick,
    )
    for name, once in passes.items():
        with torch.inference_mode(contest.training is None):
            seen[name]["launch_milliseconds"] = _launching(once, weight.device)
    return tuple(
        _result(name, seconds, times[PLAIN], repeats, contest, model, **seen[name]) for name, seconds in times.items()
    )


def _contenders(model: nn.Module, contest: Contest) -> Iterator[tuple[str, nn.Module]]:
    yield PLAIN, copy_sharing_weights(model).eval()
    for method in (*contest.methods, CEILING):
        yield method, fuse(copy_sharing_weights(model), method, r=contest.r).eval()
    ceiling = fuse(copy_sharing_weights(model), CEILING, r=contest.r).eval()
    projections = [module for module in ceiling.modules() if isinstance(module, MatmulPatchEmbed)]
    for projection in projections:
        projection.wanted = _never
    if projections and next(model.parameters()).is_cuda:
        yield f"{CEILING}, own patch embedding", ceiling


def _never() -> bool:
    return False


@torch.inference_mode()
def check(fused: nn.Module, images: Tensor, name: str, *, run: Callable[[Tensor], Any] | None = None) -> float:
    """How far the fused model is from itself in float32 and plain operations: the median over a few images, relative.

    The median, because two pairs of tokens may score alike within rounding, and then one image may rightly differ.
    run: the compiled model, so that what is checked is what is timed, and no kernel is built for the check alone.
    """
    reference = copy.deepcopy(fused).float()
    with plain_operations():
        expected = reference(images[:_CHECKED_IMAGES].float())
    found = fused(images[:_CHECKED_IMAGES]) if run is None else run(images)[:_CHECKED_IMAGES]
    found = found.float()
    distance = ((found - expected).norm(dim=1) / expected.norm(dim=1)).median().item()
    if not distance <= _TOLERANCE[images.dtype]:
        raise MctfError(
            f"{name} is wrong on this machine: its output is {distance:.1%} off in {images.dtype}; "
            "set MCTF_KERNELS=0 to do without its kernels, and please report it"
        )
    return distance


def _pass(model: nn.Module, contest: Contest) -> Callable[[Tensor], Any]:
    """What is timed: a forward pass, or one of training."""
    forward: Callable[[Tensor], Tensor] = model.train(contest.training is not None)
    if contest.compiled is not None:
        mode = None if contest.compiled == "default" else contest.compiled
        forward = torch.compile(model, fullgraph=True, mode=mode)
    return forward if contest.training is None else partial(_train, model, forward, contest.training)


def _train(model: nn.Module, forward: Callable[[Tensor], Tensor], dtype: torch.dtype, images: Tensor) -> None:
    """Forward and backward, without an optimiser: its time does not depend on tokens."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(images.device.type, dtype, enabled=dtype != images.dtype):
        logits = forward(images)
    logits.float().square().mean().backward()


def _repeats(timing: Timing) -> int:
    """So many passes that one timing takes about a fifth of a second: shorter ones measure the clock."""
    return max(1, min(200, round(0.2 / timing.median)))


def _repeat(once: Callable[[], object], repeats: int) -> None:
    for _ in range(repeats):
        once()


def _peak(once: Callable[[], object], device: torch.device) -> float | None:
    """MiB at the peak of a pass, weights and images included; warms the model up as well."""
    for _ in range(3):
        once()
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    once()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 2**20


def _launching(once: Callable[[], object], device: torch.device) -> float | None:
    """Milliseconds until a pass is queued on an idle device, not done: the median of a few; None on a CPU."""
    if device.type == "cpu":
        return None
    seconds = []
    for _ in range(9):
        synchronize(device)
        start = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - start)
    synchronize(device)
    return median(seconds) * 1e3


def _result(
    name: str,
    timing: Timing,
    plain: Timing,
    repeats: int,
    contest: Contest,
    model: nn.Module,
    **seen: float | None,
) -> Result:
    method = name.partition(",")[0]
    r: ReductionSpec = 0 if name == PLAIN else contest.r
    made = plan(model, method="mctf" if name == PLAIN else method, r=r, image_size=contest.image_size)
    seconds = timing.median / repeats
    return Result(
        name=name,
        r=r,
        batch=contest.batch,
        milliseconds=seconds * 1e3,
        spread=timing.spread,
        images_per_second=contest.batch / seconds,
        speedup=timing.speedup_over(plain),
        gflops=made.gflops,
        **seen,
    )
