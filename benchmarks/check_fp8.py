"""fp8 on this GPU against its emulation, layer by layer and on whole models: `python benchmarks/check_fp8.py`.

It prints one line per check and exits with 1 where one fails. Nothing but torch is needed for the layers; whole models
need timm. Weights are random, images noise.

1. Layers of ViT-B, L and H, whole and sliced, eager and compiled: `torch._scaled_mm` equals the emulation in float32.
2. DeiT-Tiny and ViT-L/16, unfused and fused by ward, compiled without graph breaks: close to the emulation.
3. The kernels of one compiled MLP: the quantizing of its inputs is fused into the norm and the GELU before it.
"""

import importlib.util
import sys

import torch
from torch import Tensor, nn

import mctf
from mctf.kernels import disable_kernels
from mctf.kernels.quantized_linear import QuantizedLinear

SHAPES = ((768, 2304), (1024, 3072), (1024, 4096), (4096, 1024), (1280, 3840), (5120, 1280))
LAYER_TOLERANCE = 0.01  # of bfloat16 outputs, and of fast accumulation
MODEL_TOLERANCE = 0.2  # inputs that rounding moves fall on other quantized numbers
failures = 0


def report(name: str, error: float, tolerance: float) -> None:
    global failures
    good = error <= tolerance
    failures += not good
    print(f"{'ok  ' if good else 'FAIL'} {name}: relative error {error:.4f}, {tolerance} is allowed", flush=True)


def relative(output: Tensor, expected: Tensor) -> float:
    return ((output.float() - expected.float()).norm() / expected.float().norm()).item()


def check_layer(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    linear = nn.Linear(inputs, outputs).eval().to("cuda", dtype)
    x = torch.randn(3, 197, inputs, device="cuda", dtype=dtype)  # 591 rows: no multiple of 16
    layer = QuantizedLinear.of(linear, "fp8", 2 * x.abs().max().item() / 448)
    name = f"{inputs} to {outputs}, {dtype}"
    if not layer.native:
        sys.exit("this GPU has no fp8 tensor cores, or this torch is not for CUDA")
    third = outputs // 3 // 16 * 16
    with disable_kernels():
        expected, part = layer(x), layer.rows(x[:, :1], third, 2 * third)
    report(f"{name}, eager", relative(layer(x), expected), LAYER_TOLERANCE)
    report(
        f"{name}, rows {third} to {2 * third} of 3 tokens",
        relative(layer.rows(x[:, :1], third, 2 * third), part),
        LAYER_TOLERANCE,
    )
    if dtype == torch.bfloat16:
        compiled = torch.compile(layer, fullgraph=True)
        report(f"{name}, compiled", relative(compiled(x), expected), LAYER_TOLERANCE)


def check_model(name: str, *, fused: bool) -> None:
    import timm

    model = timm.create_model(name).eval().to("cuda", torch.bfloat16)
    images = torch.randn(8, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    if fused:
        mctf.fuse(model, "ward", flops=0.56)
    mctf.quantize(model, "fp8", calibration=images)
    print(mctf.Quantization.of(model))
    with disable_kernels():
        expected = model(images)
    output = torch.compile(model, fullgraph=True)(images)
    error = ((output - expected).float().norm(dim=1) / expected.float().norm(dim=1)).median().item()
    report(f"{name}{', ward' if fused else ''}, compiled, median image", error, MODEL_TOLERANCE)


def list_kernels() -> None:
    """Kernels of a compiled pass: expected are the norm with one quantizing, two products, GELU with the other."""

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(1024)
            self.fc1, self.fc2 = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))

    mlp = MLP().eval().to("cuda", torch.bfloat16)
    mlp.fc1, mlp.fc2 = QuantizedLinear.of(mlp.fc1, "fp8", 0.02), QuantizedLinear.of(mlp.fc2, "fp8", 0.02)
    x = torch.randn(128, 197, 1024, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(mlp, fullgraph=True)
    for _ in range(3):
        compiled(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compiled(x)
        torch.cuda.synchronize()
    for event in profile.key_averages():
        print(f"     {event.self_device_time_total:8.0f} us  {event.count} x {event.key[:90]}")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("there is no GPU")
    torch.manual_seed(0)
    with torch.inference_mode():
        for shape in SHAPES:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                check_layer(*shape, dtype)
        list_kernels()
        if importlib.util.find_spec("timm") is not None:
            for model in ("deit_tiny_patch16_224", "vit_large_patch16_224"):
                for fused in (False, True):
                    check_model(model, fused=fused)
    print("all checks passed" if not failures else f"{failures} checks failed")
    sys.exit(failures > 0)
