"""One dataset for evaluation and training: sources, class indices, subsets, and what cannot be trained on."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.data_feeds import options
from helpers.images import make_picture, write_folder, zip_folder
from helpers.shared_data import SHARED, needs_shared
from mctf import MctfError
from mctf.data import ImageDataset, make_feed, open_dataset


def targets_of(dataset: ImageDataset) -> list[int]:
    assert dataset.targets is not None
    assert dataset.targets.dtype == torch.int64
    return dataset.targets.tolist()


def write_table(folder: Path, text: str) -> Path:
    path = folder / "classes.tsv"
    path.write_text(text)
    return path


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "pets", "dog/1.png", "ant/2.png", "dog/3.png", "cow/4.png")


class TestClasses:
    def test_are_numbered_by_name(self, pets: Path) -> None:
        dataset = open_dataset(pets)
        assert targets_of(dataset) == [0, 1, 2, 2]
        assert (dataset.classes, dataset.num_classes) == (["ant", "cow", "dog"], 3)

    def test_follow_a_table(self, pets: Path, tmp_path: Path) -> None:
        dataset = open_dataset(pets, classes=write_table(tmp_path, "2\tant\n0\tcow\n1\tdog\n"))
        assert (targets_of(dataset), dataset.classes) == ([2, 0, 1, 1], ["cow", "dog", "ant"])

    def test_follow_those_of_training(self, pets: Path, tmp_path: Path) -> None:
        class_to_idx = open_dataset(pets).class_to_idx
        fewer = write_folder(tmp_path / "y", "dog/1.png", "ant/2.png", "dog/3.png")
        assert targets_of(open_dataset(fewer, class_to_idx=class_to_idx)) == [0, 2, 2]
        other = write_folder(tmp_path / "z", "ant/1.png", "bee/2.png")
        with pytest.raises(MctfError, match=r"class 'bee' of .* is not among the classes of training: remove it"):
            open_dataset(other, class_to_idx=class_to_idx)

    def test_of_a_model_may_have_no_images(self, pets: Path, tmp_path: Path) -> None:
        table = write_table(tmp_path, "2\tant\n0\tcow\n4\tdog\n1\temu\n")
        dataset = open_dataset(pets).for_model(5, classes=table)
        assert (targets_of(dataset), dataset.num_classes) == ([2, 0, 4, 4], 5)
        assert "describes 4 of the model's 5 classes" in dataset.notes[0]

    def test_of_a_model_are_unknown_for_another_number(self, pets: Path) -> None:
        dataset = open_dataset(pets).for_model(10)
        assert (dataset.targets, dataset.class_to_idx, dataset.classes) == (None, None, [])
        assert "accuracy is unknown" in dataset.notes[0]

    def test_of_a_model_without_classifier_are_not_noted(self, pets: Path) -> None:
        dataset = open_dataset(pets).for_model(0)
        assert (dataset.targets, dataset.notes) == (None, ())

    def test_are_unknown_without_folders(self, tmp_path: Path) -> None:
        dataset = open_dataset(write_folder(tmp_path, "a.png", "b.png"))
        for labeled in (dataset.for_model(2), open_dataset(tmp_path, class_to_idx={"cat": 0})):
            assert labeled.targets is None
            assert "accuracy is unknown: the images of" in labeled.notes[0]

    def test_outside_a_table_are_refused(self, pets: Path, tmp_path: Path) -> None:
        table = write_table(tmp_path, "0\tant\n1\tdog\n")
        for label in (
            lambda: open_dataset(pets, classes=table),
            lambda: open_dataset(pets).for_model(2, classes=table),
        ):
            with pytest.raises(MctfError, match=r"class 'cow' of .*pets is not in .*classes\.tsv: add a line"):
                label()

    @needs_shared("data/tiny-imagenet-train-a.zip", "data/tiny-imagenet-val.zip", "data/tiny-imagenet-classes.tsv")
    def test_of_tiny_imagenet_have_the_order_of_its_table(self) -> None:
        data = SHARED / "data"
        archives = [data / "tiny-imagenet-train-a.zip", data / "tiny-imagenet-val.zip"]
        dataset = open_dataset(archives, classes=data / "tiny-imagenet-classes.tsv").check_trainable()
        assert (len(dataset), dataset.num_classes) == (35000, 200)
        assert dataset.targets is not None
        assert dataset.targets.bincount().tolist() == [175] * 200
        assert torch.equal(dataset.targets, open_dataset(archives).targets)


class TestSources:
    def test_several_are_one_dataset(self, tmp_path: Path) -> None:
        first = zip_folder(write_folder(tmp_path / "x", "ant/1.png", "cow/2.png"), tmp_path / "x.zip")
        second = write_folder(tmp_path / "y", "bee/1.png", "cow/2.png", "cow/3.png")
        for source in ([first, second], f"{first},{second}", f"{first}, {second}", [str(first), second]):
            dataset = open_dataset(source)
            assert targets_of(dataset) == [0, 2, 1, 2, 2]
            for index, seed in enumerate((0, 1, 0, 1, 2)):
                assert np.array_equal(np.asarray(dataset.read(index)), np.asarray(make_picture(seed)))

    def test_comma_in_a_name(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "cats,dogs", "cat/1.png", "dog/2.png")
        assert targets_of(open_dataset(str(folder))) == [0, 1]

    @pytest.mark.parametrize("source", ["", " ", ",", [], ["x", ""], "x.zip,", ",x.zip"])
    def test_empty_name(self, source: str | list[str]) -> None:
        with pytest.raises(MctfError, match="no images are given: a name in --data is empty, as by an unset shell"):
            open_dataset(source)

    def test_many_names(self) -> None:
        with pytest.raises(MctfError, match=r"there is no \.zip: "):
            open_dataset(",".join([".zip"] * 1000))  # too long for the name of one file


class TestSubsets:
    @pytest.fixture
    def dataset(self, tmp_path: Path) -> ImageDataset:
        names = [f"{name}/{index}.png" for name in ("cat", "dog", "emu") for index in range(4)]
        first, second = write_folder(tmp_path / "x", *names[:5]), write_folder(tmp_path / "y", *names[5:])
        return open_dataset([first, second]).for_model(3)

    def test_spaced_images_keep_their_class_indices(self, dataset: ImageDataset) -> None:
        few = dataset.spaced(2)
        assert (few.names, few.class_names, targets_of(few)) == (["cat/0.png", "dog/2.png"], ["cat", "dog"], [0, 1])
        assert few.for_model(3).targets is None  # two classes alone do not determine the model's three
        assert np.array_equal(np.asarray(few.read(1)), np.asarray(dataset.read(6)))

    def test_limit_above_the_length_changes_nothing(self, dataset: ImageDataset) -> None:
        assert dataset.spaced(12) is dataset
        assert dataset.spaced(99) is dataset

    @pytest.mark.parametrize("world_size", [1, 5, 12])
    def test_shards_are_disjoint_and_cover_the_dataset(self, dataset: ImageDataset, world_size: int) -> None:
        shards = [dataset.shard(rank, world_size) for rank in range(world_size)]
        assert sorted(row for shard in shards for row in shard.rows) == list(range(12))
        assert max(map(len, shards)) - min(map(len, shards)) <= 1
        for shard in shards:
            assert targets_of(shard) == [targets_of(dataset)[row] for row in shard.rows]
            assert shard.notes == dataset.notes

    def test_subset_of_a_subset(self, dataset: ImageDataset) -> None:
        assert list(dataset.shard(1, 3).subset([0, 3]).rows) == [1, 10]

    def test_fewer_images_than_shards(self, dataset: ImageDataset) -> None:
        with pytest.raises(MctfError, match="holds fewer images than the 13 processes: start fewer processes"):
            dataset.shard(0, 13)


class TestTrainable:
    def test_empty_class_folder(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "x", "ant/1.png", "cow/2.png")
        (folder / "bee").mkdir()
        (folder / ".cache").mkdir()
        for source in (folder, zip_folder(folder, tmp_path / "x.zip")):
            with pytest.raises(MctfError, match=r"class folder 'bee' of .* holds no images: fill it or remove it"):
                open_dataset(source).check_trainable()
        more = write_folder(tmp_path / "y", "bee/1.png")
        assert targets_of(open_dataset([folder, more]).check_trainable()) == [0, 2, 1]

    def test_class_of_the_table_without_images(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "x", "ant/1.png", "cow/2.png")
        table = write_table(tmp_path, "0\tant\n1\tbee\n2\tcow\n3\temu\n")
        message = r"x holds no images of class 'bee' \(2 of 4 classes have none\): add them, or remove .*classes\.tsv"
        with pytest.raises(MctfError, match=message):
            open_dataset(folder, classes=table).check_trainable()

    def test_table_with_gaps(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "x", "ant/1.png", "cow/2.png")
        table = write_table(tmp_path, "0\tant\n2\tcow\n")
        with pytest.raises(MctfError, match=r"classes\.tsv has no folder for class 1: number the classes from 0"):
            open_dataset(folder, classes=table).check_trainable()

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (["1.png"], "training needs labels, but the images of .* are in no class folders"),
            (["all/ant/1.png", "all/cow/2.png"], "are of one class, 'all': training needs two classes or more"),
            (["train/ant/1.png", "val/cow/2.png"], "are train, val: give one split's folder"),
        ],
    )
    def test_other_classes_than_meant(self, tmp_path: Path, names: list[str], message: str) -> None:
        with pytest.raises(MctfError, match=message):
            open_dataset(write_folder(tmp_path, *names)).check_trainable()


class TestDigest:
    def test_is_that_of_the_images_wherever_they_are(self, pets: Path, tmp_path: Path) -> None:
        moved = pets.rename(tmp_path / "moved")
        digest = open_dataset(moved).digest()
        archive = zip_folder(moved, tmp_path / "pets.zip")
        zipped = open_dataset(archive).digest()
        assert digest == open_dataset(moved).digest()
        assert zipped == open_dataset(archive.rename(tmp_path / "other.zip")).digest()

    def test_changes_with_a_name_a_size_a_label_and_the_order(self, pets: Path, tmp_path: Path) -> None:
        dataset = open_dataset(pets)
        relabeled = open_dataset(pets, classes=write_table(tmp_path, "2\tant\n0\tcow\n1\tdog\n"))
        digests = [
            dataset.digest(),
            relabeled.digest(),
            dataset.subset([1, 0, 2, 3]).digest(),
            dataset.spaced(2).digest(),
        ]
        (pets / "dog" / "1.png").rename(pets / "dog" / "2.png")
        digests.append(open_dataset(pets).digest())
        (pets / "dog" / "2.png").write_bytes(b"text")
        digests.append(open_dataset(pets).digest())
        assert len(set(digests)) == len(digests)

    def test_changes_with_the_content_of_a_zip_file(self, tmp_path: Path) -> None:
        digests = set()
        for content in (b"first", b"other"):  # of one size
            with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
                archive.writestr("cat/a.png", content)
            digests.add(open_dataset(tmp_path / "x.zip").digest())
        assert len(digests) == 2

    def test_of_a_feed_is_that_of_its_dataset(self, pets: Path) -> None:
        for in_memory in ("no", "yes"):
            built = make_feed(pets, options=options(batch=2, in_memory=in_memory), device="cpu")
            assert built.digest == open_dataset(pets).digest()
