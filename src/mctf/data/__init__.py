"""Images of folders, zip files and the Hugging Face hub: datasets, preprocessing, evaluation and training batches."""

from .dataset import ImageDataset, open_dataset
from .decode import ReadLimits
from .feed import Feed, make_feed
from .feed_options import FEED_CHOICES, FEED_LIMITS, FeedOptions, OnCorrupt, check_feed_option
from .gpu_feed import Progress
from .loader import Batch, EvalLoader
from .resources import num_workers
from .sampler import ResumableSampler
from .transforms import Preprocessing

__all__ = [
    "FEED_CHOICES",
    "FEED_LIMITS",
    "Batch",
    "EvalLoader",
    "Feed",
    "FeedOptions",
    "ImageDataset",
    "OnCorrupt",
    "Preprocessing",
    "Progress",
    "ReadLimits",
    "ResumableSampler",
    "check_feed_option",
    "make_feed",
    "num_workers",
    "open_dataset",
]
