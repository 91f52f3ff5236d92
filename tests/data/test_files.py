"""A few images keep the labels that they have among all."""

from pathlib import Path

from helpers.images import write_folder
from mctf.data import Labels, find_images, find_labels
from mctf.data.dataset import spaced


def test_a_few_images_have_the_labels_they_have_among_all(tmp_path: Path) -> None:
    files = (f"{name}/{index}.png" for name in ("cat", "dog", "emu") for index in range(4))
    images = find_images(write_folder(tmp_path, *files))
    few, labels = spaced(images, find_labels(images, num_classes=3), 2)
    assert few.names == ("cat/0.png", "dog/2.png")
    assert labels.indices == (0, 1)  # two folders alone would not tell which of three classes they are
    assert find_labels(few, num_classes=3).indices is None


def test_what_is_unknown_stays_unknown(tmp_path: Path) -> None:
    images = find_images(write_folder(tmp_path, "0.png", "1.png", "2.png"))
    few, labels = spaced(images, Labels(None, ("a note",)), 2)
    assert (len(few), labels) == (2, Labels(None, ("a note",)))
