"""Images from folders and zip files, their labels, and the preprocessing a model asks for."""

from .batches import Batch, Batches
from .classes import Labels, find_labels
from .files import ImageFiles, find_images
from .preprocessing import Preprocessing

__all__ = ["Batch", "Batches", "ImageFiles", "Labels", "Preprocessing", "find_images", "find_labels"]
