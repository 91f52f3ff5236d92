"""Patch embedding as a matrix product: the same sums as the convolution, several times faster on a GPU in bf16.

Axes: B images, C channels, H W pixels, h w patches of p by q pixels, D embedding channels.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def is_patch_convolution(module: object) -> bool:
    """Whether a module is a bare convolution over disjoint patches: stride = kernel, no padding, no hooks."""
    return (
        type(module) is nn.Conv2d
        and module.stride == module.kernel_size
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


class MatmulPatchEmbed(nn.Conv2d):
    """A patch convolution that runs as a matrix product where that is faster and `wanted()` is true.

    It shares all attributes of the convolution that it replaces, parameters included, so state_dict and optimizers
    see no difference.
    """

    wanted: Callable[[], bool]

    @classmethod
    def of(cls, convolution: nn.Conv2d, wanted: Callable[[], bool]) -> "MatmulPatchEmbed":
        product = cls.__new__(cls)
        product.__dict__.update(convolution.__dict__)
        product.__dict__["wanted"] = wanted
        product.__dict__["convolution"] = (convolution,)  # in a tuple: as a module it would be registered
        return product

    def restored(self) -> nn.Conv2d:
        """The convolution that this replaces."""
        (convolution,) = cast(Any, self.convolution)
        convolution.training = self.training
        return convolution

    def forward(self, images: Tensor) -> Tensor:
        """B C H W -> B D h w."""
        if not (_reduced_precision_on_gpu(images) and self.wanted()):
            return super().forward(images)
        return self._multiply(images)

    def _multiply(self, images: Tensor) -> Tensor:
        p, q = self.kernel_size
        h, w = images.shape[2] // p, images.shape[3] // q
        pixels = images[:, :, : h * p, : w * q].unflatten(3, (w, q)).unflatten(2, (h, p))  # B C h p w q
        rows = pixels.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # B (h w) (C p q)
        patches = F.linear(rows, self.weight.flatten(1))
        if self.bias is not None:
            # A separate addition, as after a convolution: torch.compile materializes a residual stream after a fixed
            # number of inputs, and one input fewer here would keep one more tensor in memory.
            patches = patches + self.bias
        return patches.unflatten(1, (h, w)).permute(0, 3, 1, 2)


def _reduced_precision_on_gpu(images: Tensor) -> bool:
    if not (isinstance(images, Tensor) and images.is_cuda):  # what is no tensor is refused by the convolution
        return False
    return images.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cuda")
