"""Where training images come from and how their classes are numbered."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from helpers.data_feeds import collect, number_of, options, write_plain_images
from helpers.images import make_picture, write_folder, zip_folder
from helpers.shared_data import SHARED, needs_shared
from mctf import MctfError
from mctf.data import find_images, make_feed, trained_labels
from mctf.data.dataset import hub_examples, load_hub
from mctf.data.feed import Data, open_examples


def labels_of(data: Data, classes: Path | None = None) -> list[int]:
    return open_examples(data, classes=classes).labels.tolist()


def write_table(folder: Path, text: str) -> Path:
    path = folder / "classes.tsv"
    path.write_text(text)
    return path


class TestFiles:
    def test_number_their_classes_by_name(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path, "dog/1.png", "ant/2.png", "dog/3.png", "cow/4.png")
        assert labels_of(folder) == [0, 1, 2, 2]
        assert open_examples(folder).classes == 3

    def test_to_validate_on_are_numbered_like_those_trained_on(self, tmp_path: Path) -> None:
        known = open_examples(write_folder(tmp_path / "x", "dog/1.png", "ant/2.png", "cow/4.png")).known
        fewer = find_images(write_folder(tmp_path / "y", "dog/1.png", "ant/2.png", "dog/3.png"))
        assert trained_labels(fewer, known).indices == (0, 2, 2)
        other = find_images(write_folder(tmp_path / "z", "ant/1.png", "bee/2.png"))
        with pytest.raises(MctfError, match=r"class folder 'bee' of .* is none of the classes trained on"):
            trained_labels(other, known)

    def test_follow_a_table(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "x", "dog/1.png", "ant/2.png", "dog/3.png", "cow/4.png")
        assert labels_of(folder, write_table(tmp_path, "2\tant\n0\tcow\n1\tdog\n")) == [2, 0, 1, 1]

    def test_of_several_places_are_one(self, tmp_path: Path) -> None:
        first = zip_folder(write_folder(tmp_path / "x", "ant/1.png", "cow/2.png"), tmp_path / "x.zip")
        second = write_folder(tmp_path / "y", "bee/1.png", "cow/2.png", "cow/3.png")
        for data in ([first, second], f"{first},{second}", f"{first}, {second},", [str(first), second]):
            examples = open_examples(data)
            assert examples.labels.tolist() == [0, 2, 1, 2, 2]
            pictures = [examples.source.read(index) for index in range(5)]
            expected = [make_picture(seed) for seed in (0, 1, 0, 1, 2)]
            assert [list(each.getdata()) for each in pictures] == [list(each.getdata()) for each in expected]

    def test_may_have_a_comma_in_their_name(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "cats,dogs", "cat/1.png", "dog/2.png")
        assert labels_of(str(folder)) == [0, 1]

    @needs_shared("data/tiny-imagenet-train-a.zip", "data/tiny-imagenet-val.zip", "data/tiny-imagenet-classes.tsv")
    def test_of_tiny_imagenet_have_the_order_of_its_table(self) -> None:
        data = SHARED / "data"
        archives = [data / "tiny-imagenet-train-a.zip", data / "tiny-imagenet-val.zip"]
        examples = open_examples(archives, classes=data / "tiny-imagenet-classes.tsv")
        assert (len(examples), examples.classes) == (35000, 200)
        assert torch.equal(examples.labels, open_examples(archives).labels)
        assert examples.labels.bincount().tolist() == [175] * 200


class TestFilesRefuse:
    def test_an_empty_class_folder(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "x", "ant/1.png", "cow/2.png")
        (folder / "bee").mkdir()
        (folder / ".cache").mkdir()
        archive = zip_folder(folder, tmp_path / "x.zip")
        for data in (folder, archive):
            with pytest.raises(MctfError, match=r"class folder 'bee' of .* holds no images: fill it or remove it"):
                open_examples(data)
        more = write_folder(tmp_path / "y", "bee/1.png")
        assert labels_of([folder, more]) == [0, 2, 1]

    def test_a_missing_class_folder(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "x", "ant/1.png", "cow/2.png")
        table = write_table(tmp_path, "0\tant\n1\tbee\n2\tcow\n3\temu\n")
        message = r"x holds no images of class 'bee' \(2 of 4 classes have none\): add them, or remove .*classes\.tsv"
        with pytest.raises(MctfError, match=message):
            open_examples(folder, classes=table)

    def test_a_class_folder_that_is_not_in_the_table(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "x", "ant/1.png", "cow/2.png")
        with pytest.raises(MctfError, match=r"class folder 'cow' of .*x is not in .*classes\.tsv: add a line"):
            open_examples(folder, classes=write_table(tmp_path, "0\tant\n"))

    def test_a_table_with_gaps(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "x", "ant/1.png", "cow/2.png")
        with pytest.raises(MctfError, match=r"classes\.tsv gives no folder for class 1: number the classes from 0"):
            open_examples(folder, classes=write_table(tmp_path, "0\tant\n2\tcow\n"))

    def test_images_without_classes(self, tmp_path: Path) -> None:
        with pytest.raises(MctfError, match="lie in no class folders: training needs them as class/name"):
            open_examples(write_folder(tmp_path, "1.png"))

    def test_one_class_alone(self, tmp_path: Path) -> None:
        with pytest.raises(MctfError, match="lie in one folder, 'all': training needs two classes or more"):
            open_examples(write_folder(tmp_path, "all/ant/1.png", "all/cow/2.png"))

    def test_splits_in_the_place_of_classes(self, tmp_path: Path) -> None:
        with pytest.raises(MctfError, match="holds train, val for classes: give the folder of one split"):
            open_examples(write_folder(tmp_path, "train/ant/1.png", "val/cow/2.png"))

    def test_a_zip_file_that_was_cut_off(self, tmp_path: Path) -> None:
        archive = zip_folder(write_folder(tmp_path / "x", "ant/1.png", "cow/2.png"), tmp_path / "x.zip")
        archive.write_bytes(archive.read_bytes()[:-300])
        with pytest.raises(MctfError, match=r"x\.zip is a zip file without its end: it was cut off, so fetch it again"):
            open_examples(archive)

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(MctfError, match="is empty: expected images"):
            open_examples(tmp_path)

    def test_nothing_at_all(self) -> None:
        for data in ("", ",", []):
            with pytest.raises(MctfError, match=r"there is no training data: name a folder|there is no \."):
                open_examples(data)


class ClassLabel:
    def __init__(self, names: list[str]) -> None:
        self.names = names


class Value:
    pass


class Rows:
    """Behaves as a dataset of the hub does, with rows and columns in memory."""

    def __init__(self, features: dict[str, Any], **columns: list[Any]) -> None:
        self.features = features
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: values[key] for name, values in self.columns.items()}


def hub_rows(labels: list[Any], feature: Any = None) -> Rows:
    colours = [Image.new("RGB", (8, 8), (0, 0, 255 - index)) for index in range(len(labels))]
    return Rows({"img": Value(), "label": feature or Value()}, img=colours, label=labels)


class TestHub:
    def test_classes_have_the_order_of_the_dataset(self) -> None:
        examples = hub_examples(hub_rows([2, 0, 1, 0], ClassLabel(["dog", "ant", "cow"])), name="pets")
        assert (examples.labels.tolist(), examples.classes) == ([2, 0, 1, 0], 3)

    def test_classes_follow_a_table(self, tmp_path: Path) -> None:
        table = write_table(tmp_path, "0\tant\n1\tcow\n2\tdog\n")
        rows = hub_rows([2, 0, 1, 0], ClassLabel(["dog", "ant", "cow"]))
        assert hub_examples(rows, name="pets", table=table).labels.tolist() == [1, 2, 0, 2]

    @pytest.mark.parametrize(("values", "expected"), [([10, 9, 2], [2, 1, 0]), (["dog", "ant", "cow"], [2, 0, 1])])
    def test_bare_values_are_numbered_in_order(self, values: list[Any], expected: list[int]) -> None:
        assert hub_examples(hub_rows(values), name="pets").labels.tolist() == expected

    def test_the_column_is_found_by_type(self) -> None:
        image = type("Image", (), {})()
        features = {"photo": image, "label": Value(), "kind": ClassLabel(["ant", "cow"])}
        picture = Image.new("L", (4, 4), 7)
        examples = hub_examples(Rows(features, photo=[picture, picture], label=["x", "y"], kind=[1, 0]), name="pets")
        assert examples.labels.tolist() == [1, 0]
        assert examples.source.read(0).getpixel((0, 0)) == (7, 7, 7)

    def test_it_feeds_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def load_dataset(name: str, *, split: str) -> Rows:
            asked.append((name, split))
            return hub_rows([index % 3 for index in range(9)], ClassLabel(["ant", "cow", "dog"]))

        package: Any = ModuleType("datasets")
        package.load_dataset = load_dataset
        monkeypatch.setitem(sys.modules, "datasets", package)
        for data, way in (("hf:some/pets", "yes"), ("hf:some/pets:test", "no")):
            feed = make_feed(data, options=options(in_memory=way), device="cpu")
            images, labels = collect(feed.batches(0))
            assert [number_of(image) % 3 for image in torch.cat(images)] == torch.cat(labels).tolist()
        assert asked == [("some/pets", "train"), ("some/pets", "test")]

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(MctfError, match=r"run pip install 'mctf\[datasets\]'"):
            load_hub("hf:pets")

    def test_what_cannot_be_loaded_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def load_dataset(name: str, *, split: str) -> Rows:
            raise ValueError(f'Unknown split "{split}".\nSecond line')

        package: Any = ModuleType("datasets")
        package.load_dataset = load_dataset
        monkeypatch.setitem(sys.modules, "datasets", package)
        with pytest.raises(MctfError, match=r"the dataset 'pets' cannot be loaded \(Unknown split \"x\"\.\): check"):
            load_hub("hf:pets:x")
        with pytest.raises(MctfError, match="'hf::x' names no dataset: write hf:NAME"):
            load_hub("hf::x")

    def test_unlabelled_images_are_refused(self) -> None:
        with pytest.raises(MctfError, match=r"pets has 2 images without a class \(label -1\): use a labelled split"):
            hub_examples(hub_rows([-1, 0, -1], ClassLabel(["ant"])), name="pets")

    def test_a_class_without_images_is_refused(self) -> None:
        with pytest.raises(MctfError, match=r"pets holds no images of class 'cow' \(1 of 3 classes have none\)"):
            hub_examples(hub_rows([0, 2], ClassLabel(["ant", "cow", "dog"])), name="pets")

    def test_unknown_columns_are_refused(self) -> None:
        rows = Rows({"picture": Value(), "label": Value()}, picture=[None], label=[0])
        with pytest.raises(MctfError, match="pets has the columns picture, label: expected one of type Image or named"):
            hub_examples(rows, name="pets")

    def test_a_damaged_image_is_named(self) -> None:
        rows = hub_rows([0, 1])
        rows.columns["img"][1] = None
        with pytest.raises(MctfError, match=r"image 1 of pets is unreadable \(.*\): repair or remove it"):
            hub_examples(rows, name="pets").source.read(1)


def test_plain_images_can_be_told_apart(tmp_path: Path) -> None:
    folder = write_plain_images(tmp_path, 6)
    made = make_feed(folder, options=options(batch=6), device="cpu")
    ((images, _),) = made.batches(0)
    assert sorted(number_of(image) for image in images) == list(range(6))
    assert number_of(images[0] - 1) != number_of(images[0])
