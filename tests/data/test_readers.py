"""Readers of folders, zip files and Hugging Face datasets: order, classes, and errors with their cure."""

import pickle
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.data_feeds import collect, number_of, options
from helpers.images import encode, make_picture, write_folder, zip_folder
from mctf import MctfError
from mctf.data import ReadLimits, make_feed, open_dataset
from mctf.data.hub_reader import HubReader, load_hub_dataset
from mctf.data.readers import ImageReader, open_reader

NAMES = ("cat/a.png", "cat/b.jpg", "dog/deep/c.JPEG", "dog/d.png", "emu/e.png")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "pictures", *NAMES)


@pytest.fixture(params=["folder", "zip"])
def reader(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> ImageReader:
    return open_reader(str(folder if request.param == "folder" else zip_folder(folder, tmp_path / "pictures.zip")))


class TestFiles:
    def test_are_sorted_by_name_with_the_outermost_folder_as_class(self, reader: ImageReader) -> None:
        names = [reader.name(index) for index in range(len(reader))]
        assert names == ["cat/a.png", "cat/b.jpg", "dog/d.png", "dog/deep/c.JPEG", "emu/e.png"]
        assert reader.class_names == ["cat", "cat", "dog", "dog", "emu"]

    def test_are_read_in_rgb(self, reader: ImageReader) -> None:
        image = reader.read(0)
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), np.asarray(make_picture(0)))

    @pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1"])
    def test_of_other_modes_become_rgb(self, tmp_path: Path, mode: str) -> None:
        make_picture(0).convert(mode).save(tmp_path / "x.png")
        assert open_reader(str(tmp_path)).read(0).mode == "RGB"

    def test_without_folders_are_unlabeled(self, tmp_path: Path) -> None:
        reader = open_reader(str(write_folder(tmp_path / "flat", "a.png", "b.png")))
        assert reader.class_names is None
        assert "flat are in no class folders" in reader.unlabeled

    def test_that_are_hidden_or_no_images_are_ignored(self, folder: Path, tmp_path: Path) -> None:
        (folder / "cat" / "notes.txt").write_text("a cat")
        (folder / "cat" / "._a.png").write_bytes(b"resource fork")
        (folder / "__MACOSX" / "cat").mkdir(parents=True)
        (folder / "__MACOSX" / "cat" / "a.png").write_bytes(b"resource fork")
        for source in (folder, zip_folder(folder, tmp_path / "with.zip")):
            assert open_dataset(source).names == sorted(NAMES)

    def test_of_an_open_zip_file_can_be_pickled(self, folder: Path, tmp_path: Path) -> None:
        reader = open_reader(str(zip_folder(folder, tmp_path / "pictures.zip")))
        reader.read(0)
        copied = pickle.loads(pickle.dumps(reader))
        assert np.array_equal(np.asarray(copied.read(3)), np.asarray(reader.read(3)))


class TestFileErrors:
    def test_missing_path(self, tmp_path: Path) -> None:
        with pytest.raises(MctfError, match=r"there is no .*nowhere: give a folder or a zip"):
            open_reader(str(tmp_path / "nowhere"))

    def test_file_of_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "x.zip").write_bytes(b"not a zip file")
        with pytest.raises(MctfError, match=r"x\.zip is neither a folder nor a readable zip file"):
            open_reader(str(tmp_path / "x.zip"))

    def test_truncated_zip_file(self, folder: Path, tmp_path: Path) -> None:
        archive = zip_folder(folder, tmp_path / "x.zip")
        archive.write_bytes(archive.read_bytes()[:-300])
        with pytest.raises(MctfError, match=r"x\.zip is a truncated zip file: download it again"):
            open_reader(str(archive))

    def test_zip_file_with_a_damaged_directory(self, folder: Path, tmp_path: Path) -> None:
        archive = zip_folder(folder, tmp_path / "x.zip")
        archive.write_bytes(archive.read_bytes().replace(b"PK\x01\x02", b"PK\x09\x09"))
        with pytest.raises(MctfError, match=r"x\.zip cannot be read as a zip file .*: download it again"):
            open_reader(str(archive))

    def test_empty_sources(self, tmp_path: Path) -> None:
        zipfile.ZipFile(tmp_path / "x.zip", "w").close()
        (tmp_path / "folder" / "cat").mkdir(parents=True)
        for name in ("x.zip", "folder"):
            with pytest.raises(MctfError, match="is empty: expected images"):
                open_reader(str(tmp_path / name))

    def test_folder_without_images(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("text")
        with pytest.raises(MctfError, match=r"holds no images: expected files ending in .*\.jpg"):
            open_reader(str(tmp_path))

    def test_classes_beside_loose_images(self, folder: Path) -> None:
        write_folder(folder, "loose.png")
        with pytest.raises(MctfError, match=r"loose images \(loose\.png\) side by side"):
            open_reader(str(folder))

    @pytest.mark.parametrize(
        ("content", "reason"), [(b"text", "unknown image"), (encode(make_picture(0), "JPEG")[:-99], "truncated")]
    )
    def test_damaged_image(self, folder: Path, content: bytes, reason: str) -> None:
        (folder / "cat" / "b.jpg").write_bytes(content)
        message = rf"cat/b\.jpg is not a readable image \(.*{reason}.*\): repair or remove it"
        with pytest.raises(MctfError, match=message):
            open_reader(str(folder)).read(1)


class ClassLabel:
    def __init__(self, names: list[str]) -> None:
        self.names = names


class Value:
    pass


class Rows:
    """The interface of a Hugging Face dataset, with columns in memory."""

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
    images = [Image.new("RGB", (8, 8), (0, 0, 255 - index)) for index in range(len(labels))]
    return Rows({"img": Value(), "label": feature or Value()}, img=images, label=labels)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Rows]:
    """Datasets that `datasets.load_dataset` loads, by name and split."""
    available: dict[tuple[str, str], Rows] = {}

    def load_dataset(name: str, *, split: str) -> Rows:
        if (name, split) not in available:
            raise ValueError(f'Unknown split "{split}".\nSecond line')
        return available[name, split]

    package: Any = ModuleType("datasets")
    package.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", package)
    return available


class TestHub:
    def test_labels_have_the_names_and_order_of_the_dataset(self) -> None:
        reader = HubReader(hub_rows([2, 0, 1, 0], ClassLabel(["dog", "ant", "cow"])), source="pets")
        assert (reader.class_names, reader.classes) == (["cow", "dog", "ant", "dog"], ["dog", "ant", "cow"])

    def test_integers_are_ordered_by_value(self) -> None:
        reader = HubReader(hub_rows([10, 9, 2]), source="pets")
        assert (reader.class_names, reader.classes) == (["10", "9", "2"], ["2", "9", "10"])

    def test_strings_have_no_order_of_their_own(self) -> None:
        reader = HubReader(hub_rows(["dog", "ant"]), source="pets")
        assert (reader.class_names, reader.classes) == (["dog", "ant"], None)

    def test_columns_are_recognized_by_type(self) -> None:
        image = Image.new("L", (4, 4), 7)
        features = {"photo": type("Image", (), {})(), "label": Value(), "kind": ClassLabel(["ant", "cow"])}
        reader = HubReader(Rows(features, photo=[image, image], label=["x", "y"], kind=[1, 0]), source="pets")
        assert reader.class_names == ["cow", "ant"]
        assert reader.read(0).getpixel((0, 0)) == (7, 7, 7)

    def test_split_is_part_of_the_source(self, hub: dict[tuple[str, str], Rows]) -> None:
        hub["some/pets", "train"] = hub_rows([0, 1])
        hub["some/pets", "test[:10%]"] = hub_rows([0, 1, 1])
        assert len(open_dataset("hf:some/pets")) == 2
        dataset = open_dataset("hf:some/pets:test[:10%]")
        assert (len(dataset), dataset.names[2]) == (3, "image 2")

    def test_evaluation_takes_the_order_of_the_dataset(self, hub: dict[tuple[str, str], Rows]) -> None:
        hub["pets", "train"] = hub_rows([2, 0, 1], ClassLabel(["dog", "ant", "cow"]))
        dataset = open_dataset("hf:pets").for_model(3)
        assert dataset.targets is not None
        assert dataset.targets.tolist() == [2, 0, 1]
        assert dataset.notes == ("classes are numbered as in the dataset",)

    def test_unlabeled_images_are_evaluated_without_accuracy(self, hub: dict[tuple[str, str], Rows]) -> None:
        hub["pets", "train"] = hub_rows([-1, 0, -1], ClassLabel(["ant"]))
        hub["photos", "train"] = Rows({"image": Value()}, image=[None])
        for name, reason in (("pets", "2 images without a class (label -1)"), ("photos", "has the columns image:")):
            dataset = open_dataset(f"hf:{name}")
            assert dataset.for_model(10).targets is None
            assert reason in dataset.for_model(10).notes[0]
            with pytest.raises(MctfError, match="training needs labels, but"):
                dataset.check_trainable()

    @pytest.mark.parametrize("in_memory", ["yes", "no"])
    def test_feeds_training(self, hub: dict[tuple[str, str], Rows], in_memory: str) -> None:
        hub["pets", "train"] = hub_rows([index % 3 for index in range(9)], ClassLabel(["ant", "cow", "dog"]))
        feed = make_feed("hf:pets", options=options(in_memory=in_memory), device="cpu")
        images, labels = collect(feed.batches(0))
        assert [number_of(image) % 3 for image in torch.cat(images)] == torch.cat(labels).tolist()
        hub["pets", "train"] = hub_rows([0, 2], ClassLabel(["ant", "cow", "dog"]))
        with pytest.raises(MctfError, match=r"pets holds no images of class 'cow' \(1 of 3 classes have none\)"):
            make_feed("hf:pets", options=options(), device="cpu")

    def test_fingerprint_is_that_of_the_dataset(self) -> None:
        rows: Any = hub_rows([0, 1])
        unnamed = HubReader(rows, source="pets").fingerprint(1)
        rows._fingerprint = "f00d"
        assert (unnamed, HubReader(rows, source="pets").fingerprint(1)) == ((2, 1), ("f00d", 1))

    def test_missing_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(MctfError, match=r"pip install 'mctf\[datasets\]'"):
            load_hub_dataset("hf:pets")

    @pytest.mark.usefixtures("hub")
    def test_dataset_that_cannot_be_loaded(self) -> None:
        with pytest.raises(MctfError, match=r"the dataset 'pets' cannot be loaded \(Unknown split \"x\"\.\): check"):
            load_hub_dataset("hf:pets:x")
        with pytest.raises(MctfError, match="'hf::x' names no dataset: write hf:NAME"):
            load_hub_dataset("hf::x")

    def test_missing_image_column(self) -> None:
        rows = Rows({"picture": Value(), "label": Value()}, picture=[None], label=[0])
        with pytest.raises(MctfError, match="pets has the columns picture, label: expected one of type Image or named"):
            HubReader(rows, source="pets")

    def test_encoded_images_are_checked_before_they_are_decoded(self, tmp_path: Path) -> None:
        class Image:  # the type of a column is recognized by its name
            def __init__(self, decode: bool = True) -> None:
                self.decode = decode

        class Decoding(Rows):
            def cast_column(self, column: str, feature: Image) -> Rows:
                assert (column, feature.decode) == ("photo", False)
                return Rows({"photo": feature}, photo=encoded)

        make_picture(1).save(tmp_path / "x.png")
        encoded: list[dict[str, Any]] = [
            {"bytes": encode(make_picture(0)), "path": None},
            {"bytes": None, "path": str(tmp_path / "x.png")},
            {"bytes": None, "path": "elsewhere/x.png"},
        ]
        rows = Decoding({"photo": Image()}, photo=[None, None, make_picture(2)])
        reader = HubReader(rows, source="pets")
        for index in range(3):
            assert np.array_equal(np.asarray(reader.read(index)), np.asarray(make_picture(index)))
        with pytest.raises(MctfError, match=r"image 0 of pets is not a readable image \(it has 48 x 40 pixels, over"):
            HubReader(rows, source="pets", limits=ReadLimits(max_pixels=9)).read(0)

    def test_sixteen_bits_are_scaled(self) -> None:
        rows = hub_rows([0])
        rows.columns["img"][0] = Image.fromarray(np.full((4, 4), 257 * 9, np.uint16))
        assert HubReader(rows, source="pets").read(0).getpixel((0, 0)) == (9, 9, 9)

    def test_damaged_image(self) -> None:
        rows = hub_rows([0, 1])
        rows.columns["img"][1] = None
        with pytest.raises(MctfError, match=r"image 1 of pets is not a readable image \(.*\): repair or remove it"):
            HubReader(rows, source="pets").read(1)
