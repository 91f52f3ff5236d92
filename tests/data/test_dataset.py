"""Images from folders and zip files, their labels, and preprocessing."""

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torchvision.transforms.functional import center_crop, normalize, resize, to_tensor

from helpers.images import encode, make_picture, write_folder, zip_folder
from mctf import MctfError
from mctf.data import Batches, ImageFiles, Labels, Preprocessing, find_images, find_labels
from mctf.data.labels import read_classes

NAMES = ("cat/a.png", "cat/b.jpg", "dog/deep/c.JPEG", "dog/d.png", "emu/e.png")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "pictures", *NAMES)


@pytest.fixture(params=["folder", "zip"])
def images(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> ImageFiles:
    return find_images(folder if request.param == "folder" else zip_folder(folder, tmp_path / "pictures.zip"))


def batched(images: ImageFiles, **options: int) -> Batches:
    return Batches(images, Labels(tuple(range(len(images)))), to_tensor, **options)


class TestFiles:
    def test_are_found_in_order_of_their_names(self, images: ImageFiles) -> None:
        assert images.names == ("cat/a.png", "cat/b.jpg", "dog/d.png", "dog/deep/c.JPEG", "emu/e.png")
        assert images.folders == ("cat", "cat", "dog", "dog", "emu")

    def test_are_read_in_rgb(self, images: ImageFiles) -> None:
        picture = images.read(0)
        assert picture.mode == "RGB"
        assert np.array_equal(np.asarray(picture), np.asarray(make_picture(0)))

    @pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1"])
    def test_of_other_modes_become_rgb(self, tmp_path: Path, mode: str) -> None:
        make_picture(0).convert(mode).save(tmp_path / "x.png")
        assert find_images(tmp_path).read(0).mode == "RGB"

    def test_without_folders_have_no_classes(self, tmp_path: Path) -> None:
        images = find_images(write_folder(tmp_path / "flat", "a.png", "b.png"))
        assert images.folders is None

    def test_hidden_twins_and_other_files_are_left_out(self, folder: Path, tmp_path: Path) -> None:
        (folder / "cat" / "notes.txt").write_text("a cat")
        (folder / "cat" / "._a.png").write_bytes(b"twin")
        (folder / "__MACOSX" / "cat").mkdir(parents=True)
        (folder / "__MACOSX" / "cat" / "a.png").write_bytes(b"twin")
        for place in (folder, zip_folder(folder, tmp_path / "with.zip")):
            assert find_images(place).names == tuple(sorted(NAMES))

    def test_limit_spaces_them_evenly(self, tmp_path: Path) -> None:
        images = find_images(write_folder(tmp_path / "many", *(f"{index}.png" for index in range(10))))
        assert images.spaced(3).names == ("0.png", "3.png", "6.png")
        assert images.spaced(10) is images
        assert images.spaced(99) is images

    def test_an_archive_travels_without_its_handle(self, folder: Path, tmp_path: Path) -> None:
        images = find_images(zip_folder(folder, tmp_path / "pictures.zip"))
        images.read(0)
        copied = pickle.loads(pickle.dumps(images))
        assert np.array_equal(np.asarray(copied.read(3)), np.asarray(images.read(3)))


class TestFilesRefuse:
    def test_a_missing_path(self, tmp_path: Path) -> None:
        with pytest.raises(MctfError, match=r"there is no .*nowhere: give a folder or a zip"):
            find_images(tmp_path / "nowhere")

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "x.zip").write_bytes(b"no zip at all")
        with pytest.raises(MctfError, match=r"x\.zip is neither a folder nor a readable zip file"):
            find_images(tmp_path / "x.zip")

    def test_an_archive_whose_directory_is_damaged(self, folder: Path, tmp_path: Path) -> None:
        path = zip_folder(folder, tmp_path / "x.zip")
        path.write_bytes(path.read_bytes().replace(b"PK\x01\x02", b"PK\x09\x09"))
        with pytest.raises(MctfError, match=r"x\.zip cannot be read as a zip file .*: fetch it again"):
            find_images(path)

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        (tmp_path / "cat").mkdir()
        with pytest.raises(MctfError, match="is empty: expected images"):
            find_images(tmp_path)

    def test_an_empty_archive(self, tmp_path: Path) -> None:
        zipfile.ZipFile(tmp_path / "x.zip", "w").close()
        with pytest.raises(MctfError, match="is empty: expected images"):
            find_images(tmp_path / "x.zip")

    def test_a_folder_without_images(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("nothing to see")
        with pytest.raises(MctfError, match=r"holds no images: expected files ending in .*\.jpg"):
            find_images(tmp_path)

    def test_classes_and_loose_images_together(self, folder: Path) -> None:
        write_folder(folder, "loose.png")
        with pytest.raises(MctfError, match=r"loose images \(loose\.png\) side by side"):
            find_images(folder)

    @pytest.mark.parametrize(
        ("content", "reason"), [(b"no image", "no format"), (encode(make_picture(0), "JPEG")[:-99], "truncated")]
    )
    def test_a_damaged_image(self, folder: Path, content: bytes, reason: str) -> None:
        (folder / "cat" / "b.jpg").write_bytes(content)
        with pytest.raises(MctfError, match=rf"cat/b\.jpg is no readable image \(.*{reason}.*\): repair or remove it"):
            find_images(folder).read(1)


class TestBatches:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_hold_every_image_once_and_in_order(self, images: ImageFiles, workers: int) -> None:
        batches = batched(images, batch_size=2, workers=workers)
        seen = list(batches)
        assert len(batches) == len(seen) == 3
        assert [len(batch) for batch in seen] == [2, 2, 1]
        pixels = torch.cat([batch.pixels for batch in seen])
        assert torch.equal(pixels, torch.stack([to_tensor(images.read(index)) for index in range(5)]))
        assert torch.cat([batch.labels for batch in seen if batch.labels is not None]).tolist() == [0, 1, 2, 3, 4]

    def test_without_labels_have_none(self, images: ImageFiles) -> None:
        assert all(batch.labels is None for batch in Batches(images, Labels(None), to_tensor))

    @pytest.mark.parametrize("workers", [0, 1])
    def test_say_which_image_is_damaged(self, folder: Path, workers: int) -> None:
        (folder / "dog" / "d.png").write_bytes(b"no image")
        with pytest.raises(MctfError) as raised:
            list(batched(find_images(folder), workers=workers))
        assert "dog/d.png is no readable image" in str(raised.value)
        assert len(str(raised.value).splitlines()) == 1


class TestLabels:
    def test_follow_the_table(self, images: ImageFiles, tmp_path: Path) -> None:
        table = tmp_path / "classes.tsv"
        table.write_text("2\tcat\tTabby\n0\tdog\n\n1\temu\tEmu, the bird\n")
        assert find_labels(images, num_classes=3, table=table) == Labels((2, 2, 0, 0, 1))

    def test_a_table_of_fewer_classes_is_noted(self, images: ImageFiles, tmp_path: Path) -> None:
        table = tmp_path / "classes.tsv"
        table.write_text("2\tcat\tTabby\n0\tdog\tPug\n1\temu\tEmu\n")
        labels = find_labels(images, num_classes=10, table=table)
        assert labels.indices == (2, 2, 0, 0, 1)
        assert "describes 3 of the model's 10 classes" in labels.notes[0]

    def test_follow_imagenet_where_folders_are_its_wnids(self, tmp_path: Path) -> None:
        wnids = ImageNetInfo().label_names()
        images = find_images(write_folder(tmp_path, f"{wnids[7]}/a.png", f"{wnids[3]}/b.png", f"{wnids[999]}/c.png"))
        assert images.folders is not None
        by_folder = dict(zip(images.folders, find_labels(images, num_classes=1000).indices or (), strict=True))
        assert by_folder == {wnids[7]: 7, wnids[3]: 3, wnids[999]: 999}

    def test_follow_tiny_imagenet_where_folders_are_its_wnids(self, tmp_path: Path) -> None:
        images = find_images(write_folder(tmp_path, "n12267677/a.png", "n01443537/b.png", "n02123045/c.png"))
        labels = find_labels(images, num_classes=200)
        assert labels == Labels((0, 30, 199), ("classes are numbered as in Tiny-ImageNet",))
        assert find_labels(images, num_classes=199).indices is None
        assert find_labels(images, num_classes=3).notes == ("classes are numbered by folder name",)

    def test_follow_the_folders_where_these_are_as_many_as_classes(self, images: ImageFiles) -> None:
        labels = find_labels(images, num_classes=3)
        assert labels.indices == (0, 0, 1, 1, 2)
        assert labels.notes == ("classes are numbered by folder name",)

    @pytest.mark.parametrize("num_classes", [2, 4, 1000])
    def test_are_unknown_elsewhere(self, images: ImageFiles, num_classes: int) -> None:
        labels = find_labels(images, num_classes=num_classes)
        assert labels.indices is None
        assert f"3 class folders cannot be told apart among the model's {num_classes} classes" in labels.notes[0]

    def test_are_unknown_without_folders(self, tmp_path: Path) -> None:
        labels = find_labels(find_images(write_folder(tmp_path, "a.png")), num_classes=1)
        assert labels.indices is None
        assert "no class folders" in labels.notes[0]

    def test_are_unknown_without_a_classifier(self, images: ImageFiles) -> None:
        assert find_labels(images, num_classes=0) == Labels(None)

    def test_refuse_a_folder_that_is_not_in_the_table(self, images: ImageFiles, tmp_path: Path) -> None:
        table = tmp_path / "classes.tsv"
        table.write_text("0\tcat\tTabby\n1\tdog\tPug\n")
        with pytest.raises(MctfError, match=r"class folder 'emu' of .* is not in .*classes\.tsv: add a line"):
            find_labels(images, num_classes=3, table=table)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is empty: expected lines of index, folder and name"),
            (b"0\tcat\n1 dog\n", "line 2 of .* is '1 dog': expected index, folder and name between tabs"),
            (b"index\tfolder\tname\n", "line 1 of .* expected index, folder and name between tabs"),
            (b"-1\tcat\n", "line 1 of .* expected index, folder and name between tabs"),
            (b"0\t\tcat\n", "line 1 of .* expected index, folder and name between tabs"),
            (b"0\tcat\n1\tcat\n", "line 2 of .* names 'cat' again: give every folder one line"),
            (b"0\tcat\n3\tdog\n", "has class 3, but the model has 3 classes: use the model's table"),
            (b"0\t\xff\xfe\n", "is no UTF-8 text"),
        ],
    )
    def test_refuse_a_malformed_table(self, tmp_path: Path, content: bytes, message: str) -> None:
        table = tmp_path / "classes.tsv"
        table.write_bytes(content)
        with pytest.raises(MctfError, match=message):
            read_classes(table, num_classes=3)

    def test_refuse_a_missing_table(self, tmp_path: Path) -> None:
        with pytest.raises(MctfError, match="there is no class table"):
            read_classes(tmp_path / "nowhere.tsv", num_classes=3)


class TestPreprocessing:
    def test_is_what_the_model_was_made_for(self) -> None:
        found = Preprocessing.of(timm.create_model("test_vit"))
        assert found == Preprocessing(
            image_size=(160, 160),
            crop_pct=0.95,
            crop_mode="center",
            interpolation="bicubic",
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
        )

    def test_follows_the_image_size_of_the_model_and_another_crop(self) -> None:
        found = Preprocessing.of(timm.create_model("test_vit", img_size=(96, 128)), crop_pct=0.875)
        assert (found.image_size, found.crop_pct) == ((96, 128), 0.875)
        assert found.transform()(make_picture(0)).shape == (3, 96, 128)

    def test_resizes_crops_and_normalises(self) -> None:
        picture = make_picture(0, width=300, height=200)
        seen = Preprocessing.of(timm.create_model("test_vit")).transform()(picture)
        smaller = picture.resize((252, 168), Image.Resampling.BICUBIC)  # 160 / 0.95 = 168 for the shorter side
        expected = normalize(to_tensor(center_crop(smaller, [160, 160])), [0.5] * 3, [0.5] * 3)
        assert torch.equal(seen, expected)

    @pytest.mark.parametrize(("width", "height"), [(256, 256), (341, 256), (256, 999), (257, 256)])
    def test_does_not_resample_an_image_that_has_the_size(self, width: int, height: int) -> None:
        picture = make_picture(0, width=width, height=height)
        model = timm.create_model("deit_tiny_patch16_224", depth=1)
        seen = Preprocessing.of(model, crop_pct=0.875).transform()(picture)  # 224 / 0.875 = 256
        mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
        assert torch.equal(seen, normalize(to_tensor(center_crop(picture, [224, 224])), mean, std))

    def test_oblong_crops_use_the_interpolation_of_the_model(self) -> None:
        picture = make_picture(0, width=300, height=300)
        preprocessing = Preprocessing.of(timm.create_model("test_vit", img_size=(96, 128)), crop_pct=1.0)
        expected = center_crop(resize(picture, [128, 128], Image.Resampling.BICUBIC), [96, 128])
        assert torch.equal(preprocessing.transform()(picture), normalize(to_tensor(expected), [0.5] * 3, [0.5] * 3))
