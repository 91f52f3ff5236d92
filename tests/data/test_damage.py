"""Training images that cannot be read: skipped by a fixed rule and counted, or a reason to stop."""

import warnings
from pathlib import Path

import pytest
import torch

from helpers.data_feeds import assert_same, collect, feed, number_of, write_plain_images
from helpers.images import zip_folder
from mctf import MctfError

WAYS = ("no", "yes")
COUNT = 24


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """24 images of 3 classes; in the order of names, the second is broken, and so are the last two."""
    folder = write_plain_images(tmp_path / "images", COUNT)
    for name in ("class0/003.png", "class2/020.png", "class2/023.png"):
        (folder / name).write_bytes(b"no image")
    return folder


def quietly(made: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(made.batches(0))  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:skipped")
@pytest.mark.parametrize("way", WAYS)
class TestSkipped:
    def test_are_counted_and_replaced_by_the_next_readable_one(self, damaged: Path, way: str) -> None:
        made = feed(damaged, in_memory=way)
        images, labels = collect(quietly(made))
        assert made.skipped == 3
        numbers = [number_of(image) for image in torch.cat(images)]
        # after class0/003 comes class0/006; after class2/020 and class2/023 begins the list again with class0/000
        assert sorted(numbers) == sorted([*(set(range(COUNT)) - {3, 20, 23}), 6, 0, 0])
        assert torch.cat(labels).tolist() == [number % 3 for number in numbers]

    def test_do_not_disturb_resuming(self, damaged: Path, way: str) -> None:
        whole = quietly(feed(damaged, in_memory=way, augmentation="strong"))
        for start in range(7):
            assert_same(whole[start:], feed(damaged, in_memory=way, augmentation="strong").batches(0, start=start))

    def test_stop_where_asked(self, damaged: Path, way: str) -> None:
        with pytest.raises(MctfError) as raised:
            list(feed(damaged, in_memory=way, on_corrupt="stop").batches(0))
        message = str(raised.value)
        assert ".png is no readable image (no format that Pillow knows): repair or remove it, or skip such" in message
        assert len(message.splitlines()) == 1

    def test_all_of_them_stop(self, tmp_path: Path, way: str) -> None:
        folder = write_plain_images(tmp_path, 6)
        for path in folder.rglob("*.png"):
            path.write_bytes(b"no image")
        with pytest.raises(MctfError, match=r"6 images in a row are unreadable, the first being: .*\.png is no"):
            list(feed(folder, in_memory=way).batches(0))


class TestWarnings:
    @pytest.mark.parametrize("workers", [0, 1])
    def test_name_each_image_once(self, damaged: Path, workers: int) -> None:
        made = feed(damaged, in_memory="no", workers=workers)
        with pytest.warns(UserWarning, match="skipped") as caught:
            batches = [list(made.batches(epoch)) for epoch in range(2)]
        assert [len(each) for each in batches] == [6, 6]
        said = sorted(str(warning.message).split("/")[-1].split(" ")[0] for warning in caught)
        assert said == ["003.png", "020.png", "023.png"]

    def test_do_not_go_on_for_ever(self, tmp_path: Path) -> None:
        folder = write_plain_images(tmp_path, COUNT)
        for path in sorted(folder.rglob("*.png"))[::2]:
            path.write_bytes(b"no image")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = feed(folder, in_memory="yes")
        assert len(caught) == 6
        assert "only counted from here on" in str(caught[-1].message)
        assert made.skipped == 12


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_member_of_a_zip_file_is_skipped(tmp_path: Path, way: str) -> None:
    folder = write_plain_images(tmp_path / "images", COUNT)
    archive = zip_folder(folder, tmp_path / "x.zip")
    content = (folder / "class1/004.png").read_bytes()
    archive.write_bytes(archive.read_bytes().replace(content, content[:-9] + b"damaged!!"))
    with warnings.catch_warnings(record=True) as caught:
        made = feed(archive, in_memory=way)
        list(made.batches(0))
    assert "x.zip/class1/004.png is no readable image (Bad CRC-32" in str(caught[0].message)
    assert made.skipped == 1
