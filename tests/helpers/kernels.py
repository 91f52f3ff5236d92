"""What the tests of kernels share: dtypes, inputs, poisoned outputs and a distance."""

import torch

FLOATS = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def distance(found, expected):
    """Relative distance of two tensors, judged in float64; NaN counts as infinitely far."""
    found, expected = found.double(), expected.double()
    far = ((found - expected).norm() / expected.norm()).item()
    return far if far == far else float("inf")


def poisoned(outputs):
    """The same outputs function, whose tensors come full of NaN (or nonsense) instead of unwritten."""

    def make(*args):
        made = outputs(*args)
        for tensor in made:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -(1 << 30))
        return made

    return make


FLOOR = {torch.float32: 2e-6, torch.float16: 3e-4, torch.bfloat16: 3e-3}  # what rounding the result alone may cost


def inputs(batch, heads, tokens, channels, *, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(batch, tokens, 3, heads, channels, generator=generator).to(device, dtype)
    sizes = torch.randint(1, 9, (batch, tokens), generator=generator).float().to(device)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # strided as a qkv product leaves them
    return 2 * q, k, v, sizes
