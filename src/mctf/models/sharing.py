"""Several models around one set of weights."""

import copy
from itertools import chain

from torch import nn


def copy_sharing_weights(model: nn.Module) -> nn.Module:
    """Modules of its own around the same tensors."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
