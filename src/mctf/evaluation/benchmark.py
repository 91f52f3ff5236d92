"""Speed of a model unfused, fused by each method, and with tokens dropped at no cost, all timed in one run.

Contenders share the weights:

    baseline         the unfused model
    baseline_matmul  the unfused model, patch embedding as a matrix product
    mctf, tome, ...  fused by this method
    free_drop        the free-drop upper bound: as many tokens dropped as the methods merge, without choosing them
    free_drop_conv   the same with the patch embedding as a convolution

On a GPU in reduced precision a fused model embeds patches by a matrix product, which is faster than the convolution.
The speed-up over `baseline` includes that gain; the speed-up over `baseline_matmul` is due to fewer tokens alone. In
other cases the product is not used, and `baseline_matmul` and `free_drop_conv` are left out.

Correctness comes first: a model whose kernels disagree with the reference operations is not timed.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ..api import fuse
from ..core.schedule import ReductionSpec
from ..errors import MctfError, did_you_mean
from ..hosts import find_host
from ..hosts.patch_embed import MatmulPatchEmbed
from ..kernels import disable_kernels
from ..methods import make_method
from ..models.loading import copy_sharing_weights
from ..planning import FusionRequest, plan
from ..quantization import Quantization, quantize
from ..schedule_file import Schedule
from .timing import Timing, synchronize, time_interleaved, why_inconclusive

BASELINE, BASELINE_MATMUL = "baseline", "baseline_matmul"
FREE_DROP, FREE_DROP_CONV = "free_drop", "free_drop_conv"
LABELS = {
    BASELINE_MATMUL: "baseline, matmul patch embedding",
    FREE_DROP: "free-drop upper bound",
    FREE_DROP_CONV: "free-drop upper bound, conv patch embedding",
}
_REDUCED_PRECISION = (torch.bfloat16, torch.float16)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
_QUANTIZED_TOLERANCE = 0.2  # inputs that differ by the rounding of a dtype fall on other quantized numbers
_CHECKED_IMAGES = 4
_CALIBRATED_IMAGES = 8
_SAVING_SHOWS = 0.1  # share of the FLOPs
_LAUNCH_BOUND = 0.9  # share of a pass spent launching above which the device waits for the host


@dataclass(frozen=True)
class BenchmarkConfig:
    """What is timed: methods with one r, at one batch and image size.

    flops, schedule: in place of r, a share of the baseline's FLOPs, or a schedule with its method.
    trim_last: as for `mctf.fuse`, for all methods; the free-drop upper bound, too, where its last block drops nothing.
    precisions: in which baseline and methods are timed as well, see `mctf.quantize`.
    """

    methods: tuple[str, ...]
    r: ReductionSpec | None
    batch: int
    image_size: tuple[int, int]
    compiled: str | None = None  # None for eager, else the mode of torch.compile
    rounds: int = 7
    training: torch.dtype | None = None  # forward and backward under autocast to this dtype; None for forward alone
    flops: float | None = None
    schedule: Schedule | None = None
    trim_last: bool | None = None
    precisions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.precisions and self.training is not None:
            raise MctfError("a quantized model is not trained: leave out --training, or --precision")
        if self.compiled is not None and self.compiled not in (modes := torch._inductor.list_mode_options()):
            raise MctfError(f"{self.compiled!r} is no mode of torch.compile: {did_you_mean(self.compiled, modes)}")

    @property
    def amount(self) -> str:
        """How much is fused, for a title."""
        if self.schedule is not None:
            return f"a schedule of {self.schedule.method}"
        return f"r={self.r}" if self.flops is None else f"flops={self.flops:g}"

    def reduction(self, model: nn.Module, method: str) -> dict[str, Any]:
        """r, trim_last and the options of a method, as `fuse` and `plan` take them."""
        if self.schedule is not None:  # the upper bound drops as many tokens
            options = self.schedule.options if method == self.schedule.method else {}
            return {"r": self.schedule.r, "trim_last": self.trim_last, **options}
        request = FusionRequest.of(method, r=self.r, flops=self.flops, blocks=None, schedule=None, options={})
        host = find_host(model)
        setting = request.resolve(host, host.architecture(self.image_size), trim_last=self.trim_last)
        return {"r": setting.r, "trim_last": self.trim_last}

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether a pass is the replay of a CUDA graph."""
        return self.compiled is not None and "triton.cudagraphs" in torch._inductor.list_mode_options(self.compiled)


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
    if not any(each.name == BASELINE_MATMUL for each in results):
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
    with torch._dynamo.config.patch(recompile_limit=4 * (len(config.methods) + len(LABELS) + 1) * (1 + len(config.precisions))):
        return _benchmark(model, config, tick)


def _benchmark(model: nn.Module, config: BenchmarkConfig, tick: Callable[[], object]) -> tuple[Measurement, ...]:
    weight = next(model.parameters())
    height, width = config.image_size
    channels = getattr(model, "in_chans", 3)
    images = torch.randn(config.batch, channels, height, width, device=weight.device).to(weight.dtype)
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


def make_contenders(model: nn.Module, config: BenchmarkConfig, *, matmul: bool) -> dict[str, nn.Module]:
    """Copies of the model by name, in the order of the table, all around the same weights.

    matmul: whether fused models embed patches by a matrix product; `baseline_matmul` and `free_drop_conv` are
    contenders only then, and only where the patch embedding is a bare convolution.
    """
    convolutions = copy_sharing_weights(model)
    dropped = config.reduction(model, FREE_DROP)
    free_drop, free_drop_conv = (fuse(copy_sharing_weights(model), FREE_DROP, **dropped) for _ in range(2))
    paths = [path for path, part in free_drop.named_modules() if isinstance(part, MatmulPatchEmbed)]
    contenders = {BASELINE: copy_sharing_weights(model)}
    if matmul and paths:
        contenders[BASELINE_MATMUL] = copy_sharing_weights(model)
        for path in paths:
            convolution: Any = convolutions.get_submodule(path)
            contenders[BASELINE_MATMUL].set_submodule(path, MatmulPatchEmbed.of(convolution, _always))
            free_drop_conv.set_submodule(path, convolution)
    for method in config.methods:
        contenders[method] = fuse(copy_sharing_weights(model), method, **config.reduction(model, method))
    contenders[FREE_DROP] = free_drop
    if BASELINE_MATMUL in contenders:
        contenders[FREE_DROP_CONV] = free_drop_conv
    return {name: each.eval() for name, each in contenders.items()}


def make_quantized(contenders: Mapping[str, nn.Module], precision: str, images: Tensor) -> dict[str, nn.Module]:
    """Quantized copies of the baseline and of the methods, around the same unquantized weights."""
    few = images[:_CALIBRATED_IMAGES]
    left_out = (BASELINE_MATMUL, FREE_DROP, FREE_DROP_CONV)
    return {
        name: quantize(copy_sharing_weights(model), precision, calibration=few)
        for name, model in contenders.items()
        if name not in left_out
    }


def _is_emulated(model: nn.Module) -> bool:
    quantization = Quantization.of(model)
    return quantization is not None and not quantization.native


def _always() -> bool:
    return True


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
