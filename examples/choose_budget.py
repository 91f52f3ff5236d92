"""What each budget costs, for three methods on the same photographs, and how fast it is.

    python examples/choose_budget.py

KL is the divergence of the fused model's predictions from the unfused model's: 0 is the same prediction.
"""

import copy
import time

import skimage.data
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

import mctf
import mctf.models  # lists the model "embedded" with timm

model = timm.create_model("embedded", pretrained=True).eval()
transform = create_transform(**resolve_model_data_config(model))
photographs = [skimage.data.chelsea(), skimage.data.coffee(), skimage.data.rocket(), skimage.data.brick()]
images = torch.stack([transform(Image.fromarray(pixels).convert("RGB")) for pixels in photographs])


@torch.inference_mode()
def timed(model: torch.nn.Module) -> tuple[torch.Tensor, float]:
    """Log-probabilities, and the fastest of three passes in milliseconds."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        outputs = model(images).log_softmax(dim=1)
        times.append(time.perf_counter() - start)
    return outputs, 1000 * min(times)


baseline, slow = timed(model)
print(f"{'method':8} {'FLOPs':>6} {'KL':>7} {'speed':>6}")
for method in ("ward", "mctf", "tome"):
    for share in (0.78, 0.56):
        fused = mctf.fuse(copy.deepcopy(model), method, flops=share)
        outputs, fast = timed(fused)
        kl = (baseline.exp() * (baseline - outputs)).sum(dim=1).mean()
        kept = mctf.plan(model, method=method, flops=share)
        print(f"{method:8} {kept.gflops / kept.gflops_base:6.0%} {kl:7.4f} {slow / fast:5.2f}x")
