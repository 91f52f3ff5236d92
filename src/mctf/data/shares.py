"""Some of the images with their labels: a few of them evenly spaced, or those of one process."""

from dataclasses import replace

from ..errors import MctfError
from ..processes import Processes
from .classes import Labels
from .files import ImageFiles


def spaced(images: ImageFiles, labels: Labels, limit: int) -> tuple[ImageFiles, Labels]:
    """At most `limit` images with the labels they have among all: a few images may be of a few classes only."""
    chosen = images.spaced(limit)
    if labels.indices is None:
        return chosen, labels
    known = dict(zip(images.names, labels.indices, strict=True))
    return chosen, replace(labels, indices=tuple(known[name] for name in chosen.names))


def share(images: ImageFiles, labels: Labels, processes: Processes) -> tuple[ImageFiles, Labels]:
    """Every `world`-th image from `rank` on with its label; no image is left out or counted twice."""
    if len(images) < processes.world:
        raise MctfError(f"{images.path} holds fewer images than the {processes.world} processes: start fewer of them")
    own = slice(processes.rank, None, processes.world)
    indices = None if labels.indices is None else labels.indices[own]
    return replace(images, names=images.names[own]), replace(labels, indices=indices)
