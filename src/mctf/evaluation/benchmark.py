"""Speed of a model unfused, fused by each method, and with tokens dropped at no cost, all timed in one run.

Correctness comes first: a model whose kernels disagree with the reference operations is not timed. `contenders.py` has
what is compared.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ..core.schedule import ReductionSpec
from ..errors import MctfError
from ..hosts import find_host
from ..kernels import disable_kernels
from ..methods import make_method
from ..planning import plan
from ..quantization import Quantization
from .contenders import (
    BASELINE,
    BASELINE_MATMUL,
    FREE_DROP,
    FREE_DROP_CONV,
    LABELS,
    BenchmarkConfig,
    make_contenders,
    make_quantized,
)
from .timing import Timing, synchronize, time_interleaved, why_inconclusive

_REDUCED_PRECISION = (torch.bfloat16, torch.float16)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
_QUANTIZED_TOLERANCE = 0.2  # inputs that differ by the rounding of a dtype fall on other quantized numbers
_CHECKED_IMAGES = 4
_SAVING_SHOWS = 0.1  # share of the FLOPs
_LAUNCH_BOUND = 0.9  # share of a pass spent launching above which the device waits for the host


@dataclass(frozen=True)
class Measurement:
    """One contender: medians over rounds, spread as a share of the median, peak memory in MiB where it is counted.

    speedup: over the baseline. speedup_over_matmul: over the baseline with the patch embedding as a matrix product;
    None where there is no such contender. launch_milliseconds: time of the host to queue a pass; None on a CPU.
    difference: relative error of the output against float32 and reference operations; None where it is not checked.
    precision: of a quantized contender. emulated: the device has no such arithmetic.
    """

    name: str
    label: str
    r: ReductionSpec
    batch: int
    milliseconds: float
    spread: float
    images_per_second: float
    speedup: float
    speedup_over_matmul: float | None
    gflops: float
    peak_mib: float | None = None
    launch_milliseconds: float | None = None
    difference: float | None = None
    precision: str | None = None
    emulated: bool = False

    @property
    def is_fused(self) -> bool:
        """Whether a method is measured, not a baseline or an upper bound."""
        return self.name not in (BASELINE, BASELINE_MATMUL, FREE_DROP, FREE_DROP_CONV)

    @property
    def launch_bound(self) -> bool:
        """Whether the device waits for the host."""
        return self.launch_milliseconds is not None and self.launch_milliseconds > _LAUNCH_BOUND * self.milliseconds


def verdicts(results: Sequence[Measurement]) -> list[str]:
    """Per method its speed-up over both baselines and its distance to the upper bound, and what limits it.

    One line alone where the timings are those of a busy machine.
    """
    busy = inconclusive(results)
    if busy is not None:
        return [busy]
    upper_bound = next((each for each in results if each.name == FREE_DROP), None)
    fused = [each for each in results if each.is_fused]
    emulated = dict.fromkeys(each.precision for each in results if each.emulated)
    lines = [f"{precision} is emulated on this device, so its rows say nothing about speed" for precision in emulated]
    for each in results:
        if (not each.is_fused and each.precision is None) or each.emulated:
            continue
        what = each.label if isinstance(each.r, (tuple, list)) or not each.is_fused else f"{each.label} r={each.r}"
        if each.speedup < 1:
            lines.append(f"{what} does not pay here: {each.speedup:.2f}x the baseline's speed")
            continue
        parts = [f"{what}: {each.speedup:.2f}x"]
        if each.speedup_over_matmul is not None:
            parts.append(f"{each.speedup_over_matmul:.2f}x over the baseline with a matmul patch embedding")
        unquantized = next((one for one in results if one.name == each.name and one.precision is None), None)
        if each.precision is not None and unquantized is not None:
            parts.append(f"{unquantized.milliseconds / each.milliseconds:.2f}x over {unquantized.label}")
        elif upper_bound is not None:
            slower = each.milliseconds / upper_bound.milliseconds - 1
            side = "slower" if slower >= 0 else "faster"  # ToMe also fuses in the first block
            parts.append(f"{abs(slower):.0%} {side} than the free-drop upper bound")
        lines.append(", ".join(parts))
    if upper_bound is not None and not any(each.name == BASELINE_MATMUL for each in results):
        lines.append(
            "every contender embeds patches by the model's own convolution: "
            "the matrix product is used on a GPU in bfloat16 or float16"
        )
    if bound := [each.label for each in fused if each.launch_bound]:
        lines.append(
            f"launch-bound, the GPU waits for the host: {', '.join(bound)}; "
            "--compile --mode reduce-overhead, or a larger batch, shows what the GPU gains"
        )
    return lines


def inconclusive(results: Sequence[Measurement]) -> str | None:
    """Why nothing can be concluded from a benchmark; None where it can.

    The upper bound counts where it saves work that shows: neither with a small r nor where the host is too slow.
    """
    named = {each.name: each for each in results if each.precision is None}
    baseline, upper_bound = named.get(BASELINE), named.get(FREE_DROP)
    speedup = None
    if baseline is not None and upper_bound is not None and not upper_bound.launch_bound:
        saved = 1 - upper_bound.gflops / baseline.gflops
        speedup = upper_bound.speedup if saved > _SAVING_SHOWS else None
    return why_inconclusive(spread=max(each.spread for each in results), upper_bound=speedup)


def benchmark(
    model: nn.Module, config: BenchmarkConfig, *, tick: Callable[[], object] = lambda: None
) -> tuple[Measurement, ...]:
    """Time all contenders on random images, interleaved; `tick` is called after each step."""
    if config.compiled is None:
        return _benchmark(model, config, tick)
    for name in config.methods:
        if make_method(name, {}).adaptive:
            raise MctfError(
                f"{name} keeps as many tokens as each image needs, so its shapes depend on the data: omit --compile"
            )
    torch.compiler.reset()
    # contenders share the code of their class, and torch.compile keeps a limited number of versions per code object
    with torch._dynamo.config.patch(
        recompile_limit=4 * (len(config.methods) + len(LABELS) + 1) * (1 + len(config.precisions))
    ):
        return _benchmark(model, config, tick)


def _benchmark(model: nn.Module, config: BenchmarkConfig, tick: Callable[[], object]) -> tuple[Measurement, ...]:
    weight = next(model.parameters())
    height, width = config.image_size
    channels = getattr(model, "in_chans", 3)
    images = weight.new_empty(config.batch, channels, height, width)  # first: fails at once where memory is short
    # neighbouring patches are alike, as in photographs: white noise ends in one cluster of hundreds of tokens
    noise = torch.randn(config.batch, channels, -(-height // 16), -(-width // 16), device=weight.device)
    images.copy_(nn.functional.interpolate(noise, size=(height, width), mode="bilinear"))
    reduced_precision = (config.training or weight.dtype) in _REDUCED_PRECISION
    contenders = make_contenders(model, config, matmul=weight.is_cuda and reduced_precision)
    quantizations = {
        (name, precision): each
        for precision in config.precisions
        for name, each in make_quantized(contenders, precision, images).items()
    }
    # quantized ones under names of their own
    names = {name: (name, None) for name in contenders} | {", ".join(key): key for key in quantizations}
    contenders |= {", ".join(key): each for key, each in quantizations.items()}
    runs = {name: _pass(each, config) for name, each in contenders.items()}
    differences = {
        name: check(each, images, name, run=runs[name] if config.training is None else None)
        for name, each in contenders.items()
        if name not in (BASELINE, FREE_DROP, FREE_DROP_CONV)
    }
    passes = {name: partial(run, images) for name, run in runs.items()}
    peaks, launches = {}, {}
    for name, once in passes.items():
        with torch.inference_mode(config.training is None):
            peaks[name] = _peak_mib(once, weight.device)
        tick()
    timing = partial(time_interleaved, device=weight.device, gradient=config.training is not None)
    repeats = _repeats(timing({BASELINE: passes[BASELINE]}, rounds=3, warmup=1)[BASELINE])
    timings = timing(
        {name: partial(_repeat, once, repeats) for name, once in passes.items()},
        rounds=config.rounds,
        settle=True,
        after_round=tick,
    )
    for name, once in passes.items():
        with torch.inference_mode(config.training is None):
            launches[name] = _launch_milliseconds(once, weight.device)

    architecture = find_host(model).architecture(config.image_size)
    results = []
    for key, measured in timings.items():
        name, precision = names[key]
        method = {BASELINE: "mctf", BASELINE_MATMUL: "mctf", FREE_DROP_CONV: FREE_DROP}.get(name, name)
        fused = name not in (BASELINE, BASELINE_MATMUL)
        amount = config.reduction(model, method) if fused else {"r": 0}
        seconds = measured.median / repeats
        results.append(
            Measurement(
                name=name,
                label=LABELS.get(name, name) + ("" if precision is None else f", {precision}"),
                r=amount["r"],
                batch=config.batch,
                milliseconds=seconds * 1e3,
                spread=measured.spread,
                images_per_second=config.batch / seconds,
                speedup=measured.speedup_over(timings[BASELINE]),
                speedup_over_matmul=(
                    measured.speedup_over(timings[BASELINE_MATMUL]) if BASELINE_MATMUL in timings else None
                ),
                gflops=plan(model, method=method, architecture=architecture, **amount).gflops,
                peak_mib=None if config.uses_cuda_graphs else peaks[key],  # a graph's own memory is not counted
                launch_milliseconds=launches[key],
                difference=differences.get(key),
                precision=precision,
                emulated=_is_emulated(contenders[key]),
            )
        )
    return tuple(results)


def _is_emulated(model: nn.Module) -> bool:
    quantization = Quantization.of(model)
    return quantization is not None and not quantization.native


@torch.inference_mode()
def check(model: nn.Module, images: Tensor, name: str, *, run: Callable[[Tensor], Any] | None = None) -> float:
    """Relative error of a model against itself in float32 with reference operations, the median over a few images.

    The median, because two pairs of tokens may score alike within rounding, and one image may then rightly differ.
    run: the compiled model, so that the timed code is the checked code, and no kernel is built for the check alone.
    The reference of a quantized model multiplies the same quantized numbers in float32.
    """
    reference = copy.deepcopy(model).float()
    with disable_kernels():
        expected = reference(images[:_CHECKED_IMAGES].float())
    output = model(images[:_CHECKED_IMAGES]) if run is None else run(images)[:_CHECKED_IMAGES]
    error = ((output.float() - expected).norm(dim=1) / expected.norm(dim=1)).median().item()
    if not error <= (_TOLERANCE[images.dtype] if Quantization.of(model) is None else _QUANTIZED_TOLERANCE):
        raise MctfError(
            f"{name} is wrong on this machine: its output is {error:.1%} off in {images.dtype}; "
            "set MCTF_KERNELS=0 to run without its kernels, and please report it"
        )
    return error


def _pass(model: nn.Module, config: BenchmarkConfig) -> Callable[[Tensor], Any]:
    """What is timed: a forward pass, or a forward and a backward pass."""
    forward: Callable[[Tensor], Tensor] = model.train(config.training is not None)
    if config.compiled is not None:
        mode = None if config.compiled == "default" else config.compiled
        forward = torch.compile(model, fullgraph=True, mode=mode)
    return forward if config.training is None else partial(_train, model, forward, config.training)


def _train(model: nn.Module, forward: Callable[[Tensor], Tensor], dtype: torch.dtype, images: Tensor) -> None:
    """Forward and backward, without an optimizer: its time does not depend on tokens."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(images.device.type, dtype, enabled=dtype != images.dtype):
        logits = forward(images)
    logits.float().square().mean().backward()


def _repeats(timing: Timing) -> int:
    """Passes per timing, so that it takes about 0.2 s: shorter ones measure the clock."""
    return max(1, min(200, round(0.2 / timing.median)))


def _repeat(once: Callable[[], object], repeats: int) -> None:
    for _ in range(repeats):
        once()


def _peak_mib(once: Callable[[], object], device: torch.device) -> float | None:
    """Peak memory of a pass, weights and images included; None off a CUDA device. Also warms the model up."""
    for _ in range(3):
        once()
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    once()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 2**20


def _launch_milliseconds(once: Callable[[], object], device: torch.device) -> float | None:
    """Time until a pass is queued on an idle device, not finished: the median of a few; None on a CPU."""
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
