"""What the tests of kernels share: dtypes, inputs, poisoned outputs, a distance and the launches."""

import torch

FLOATS = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
FLOOR = {torch.float32: 2e-6, torch.float16: 3e-4, torch.bfloat16: 3e-3}  # error of rounding the result alone


def distance(actual, expected):
    """Relative distance of two tensors, in float64; infinite if it is NaN."""
    actual, expected = actual.double(), expected.double()
    relative = ((actual - expected).norm() / expected.norm()).item()
    return relative if relative == relative else float("inf")


def poisoned(allocate):
    """The same allocating function, whose tensors are full of NaN (or large negative integers)."""

    def allocate_poisoned(*args):
        outputs = allocate(*args)
        for tensor in outputs:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -(1 << 30))
        return outputs

    return allocate_poisoned


def record_launches(monkeypatch, *modules):
    """A list that receives the name of each kernel that the operators of these modules launch."""
    names = []
    for module in modules:
        original = module.launchable
        monkeypatch.setattr(
            module, "launchable", lambda kernel, original=original: names.append(kernel.__name__) or original(kernel)
        )
    return names


def inputs(batch, heads, tokens, channels, *, dtype, device, seed=0):
    """q, k and v (B H N d), strided as the parts of a qkv product, and sizes (B N)."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(batch, tokens, 3, heads, channels, generator=generator).to(device, dtype)
    sizes = torch.randint(1, 9, (batch, tokens), generator=generator).float().to(device)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return 2 * q, k, v, sizes
