"""Images divided among processes, each of them to exactly one."""

from dataclasses import replace

from ..errors import MctfError
from ..processes import Processes
from .classes import Labels
from .files import ImageFiles


def share(images: ImageFiles, labels: Labels, processes: Processes) -> tuple[ImageFiles, Labels]:
    """Every `world`-th image from `rank` on with its label; no image is left out or counted twice."""
    if len(images) < processes.world:
        raise MctfError(f"{images.path} holds fewer images than the {processes.world} processes: start fewer of them")
    own = slice(processes.rank, None, processes.world)
    indices = None if labels.indices is None else labels.indices[own]
    return replace(images, names=images.names[own]), replace(labels, indices=indices)
