"""Images from folders, zip files and hubs, their labels, the preprocessing a model asks for, and training batches."""

from .batches import Batch, Batches
from .classes import Labels, find_labels, trained_labels
from .files import ImageFiles, find_images
from .preprocessing import Preprocessing
from .training import Feed, FeedOptions, make_feed

__all__ = [
    "Batch",
    "Batches",
    "Feed",
    "FeedOptions",
    "ImageFiles",
    "Labels",
    "Preprocessing",
    "find_images",
    "find_labels",
    "make_feed",
    "trained_labels",
]
