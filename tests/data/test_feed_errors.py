"""Unreadable training images: replaced by a fixed rule and counted, or an error."""

import warnings
from pathlib import Path

import pytest
import torch

from helpers.data_feeds import assert_same, collect, feed, number_of, write_uniform_images
from helpers.images import zip_folder
from mctf import MctfError
from mctf.data import Feed

IN_MEMORY = ("no", "yes")
COUNT = 24


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """24 images of 3 classes; in the order of names the second and the last two are unreadable."""
    folder = write_uniform_images(tmp_path / "images", COUNT)
    for name in ("class0/003.png", "class2/020.png", "class2/023.png"):
        (folder / name).write_bytes(b"text")
    return folder


def batches_of(feed: Feed) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(feed.batches(0))


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize("in_memory", IN_MEMORY)
class TestSkipped:
    def test_are_counted_and_replaced_by_the_next_readable_image(self, damaged: Path, in_memory: str) -> None:
        built = feed(damaged, in_memory=in_memory)
        images, labels = collect(batches_of(built))
        assert built.skipped == 3
        numbers = [number_of(image) for image in torch.cat(images)]
        # class0/006 follows class0/003; after class2/020 and class2/023 the order wraps around to class0/000
        assert sorted(numbers) == sorted([*(set(range(COUNT)) - {3, 20, 23}), 6, 0, 0])
        assert torch.cat(labels).tolist() == [number % 3 for number in numbers]

    def test_are_replaced_alike_after_resuming(self, damaged: Path, in_memory: str) -> None:
        whole = batches_of(feed(damaged, in_memory=in_memory, augmentation="strong"))
        for start in range(7):
            assert_same(
                whole[start:], feed(damaged, in_memory=in_memory, augmentation="strong").batches(0, start=start)
            )

    def test_raise_with_stop(self, damaged: Path, in_memory: str) -> None:
        with pytest.raises(MctfError) as raised:
            list(feed(damaged, in_memory=in_memory, on_corrupt="stop").batches(0))
        message = str(raised.value)
        assert ".png is not a readable image (unknown image format): repair or remove it, or skip unreadable" in message
        assert len(message.splitlines()) == 1

    def test_raise_if_there_are_no_others(self, tmp_path: Path, in_memory: str) -> None:
        folder = write_uniform_images(tmp_path, 6)
        for path in folder.rglob("*.png"):
            path.write_bytes(b"text")
        with pytest.raises(MctfError, match=r"none of 6 images is readable, the first: .*\.png is not"):
            list(feed(folder, in_memory=in_memory).batches(0))


class TestWarnings:
    @pytest.mark.parametrize("workers", [0, 1])
    def test_name_each_image_once(self, damaged: Path, workers: int) -> None:
        built = feed(damaged, in_memory="no", workers=workers)
        with pytest.warns(UserWarning, match="skipped") as caught:
            batches = [list(built.batches(epoch)) for epoch in range(2)]
        assert [len(each) for each in batches] == [6, 6]
        names = sorted(str(warning.message).split("/")[-1].split(" ")[0] for warning in caught)
        assert names == ["003.png", "020.png", "023.png"]

    def test_are_few(self, tmp_path: Path) -> None:
        folder = write_uniform_images(tmp_path, COUNT)
        for path in sorted(folder.rglob("*.png"))[::2]:
            path.write_bytes(b"text")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            built = feed(folder, in_memory="yes")
        assert len(caught) == 6
        assert "counted without a warning" in str(caught[-1].message)
        assert built.skipped == 12


@pytest.mark.parametrize("in_memory", IN_MEMORY)
def test_damaged_member_of_a_zip_file_is_skipped(tmp_path: Path, in_memory: str) -> None:
    folder = write_uniform_images(tmp_path / "images", COUNT)
    archive = zip_folder(folder, tmp_path / "x.zip")
    content = (folder / "class1/004.png").read_bytes()
    archive.write_bytes(archive.read_bytes().replace(content, content[:-9] + b"damaged!!"))
    with warnings.catch_warnings(record=True) as caught:
        built = feed(archive, in_memory=in_memory)
        list(built.batches(0))
    assert "x.zip/class1/004.png is not a readable image (Bad CRC-32" in str(caught[0].message)
    assert built.skipped == 1
