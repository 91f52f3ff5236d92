"""Images from folders, zip files and hubs, their labels, the preprocessing a model asks for, and training batches."""

from .dataset import Batch, Batches
from .feed import Feed, FeedOptions, make_feed
from .files import ImageFiles, find_images
from .labels import Labels, find_labels, trained_labels
from .transforms import Preprocessing

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
