"""The seam: a host's stack of blocks, run under one method.

A FusedStack takes the place of the host's container (timm: `model.blocks`) and holds the *same* block modules
under the *same* names, so the state_dict does not change and the rest of the host's code runs as ever. All state
of a forward pass lives in local variables or in one `Run`: two threads can share a model.

Hosts use their container in two ways. *Calling* it (`fused.py`) runs all blocks; the fused tokens come out, spread
back to one per input token if the host's head reads them all or the user wants them dense. *Iterating* over it
(`iteration.py`: feature maps, gradient checkpointing, and hosts that loop over their blocks) yields blocks bound to
one fresh run, which take and give one token per input token and fuse only inside.
"""

from .fused import FusedStack
from .iteration import BoundBlock
from .surroundings import StackHost, Watcher

__all__ = ["BoundBlock", "FusedStack", "StackHost", "Watcher"]
