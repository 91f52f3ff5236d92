"""Class numbering for a model, and class tables."""

from pathlib import Path

import pytest
from timm.data import ImageNetInfo

from mctf import MctfError
from mctf.data.labels import encode_targets, number_classes, number_for_model, read_class_table

NAMES = ("cat", "cat", "dog", "emu")


def write_table(folder: Path, content: str | bytes) -> Path:
    path = folder / "classes.tsv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


class TestForModel:
    def test_table_comes_first(self, tmp_path: Path) -> None:
        table = write_table(tmp_path, "2\tcat\tTabby\n0\tdog\n\n1\temu\tEmu, the bird\n")
        assert number_for_model(NAMES, num_classes=3, table=table) == ({"cat": 2, "dog": 0, "emu": 1}, ())

    def test_table_of_fewer_classes_is_noted(self, tmp_path: Path) -> None:
        table = write_table(tmp_path, "2\tcat\tTabby\n0\tdog\tPug\n1\temu\tEmu\n")
        _, (note,) = number_for_model(NAMES, num_classes=10, table=table)
        assert "describes 3 of the model's 10 classes" in note

    def test_wnids_of_imagenet(self) -> None:
        wnids = ImageNetInfo().label_names()
        class_to_idx, notes = number_for_model([wnids[7], wnids[999]], num_classes=1000)
        assert class_to_idx is not None
        assert (class_to_idx[wnids[7]], class_to_idx[wnids[999]], notes) == (7, 999, ())

    def test_wnids_of_tiny_imagenet(self) -> None:
        names = ["n12267677", "n01443537", "n02123045"]
        class_to_idx, notes = number_for_model(names, num_classes=200)
        assert class_to_idx is not None
        assert sorted(class_to_idx[name] for name in names) == [0, 30, 199]
        assert notes == ("classes are numbered as in Tiny-ImageNet",)
        assert number_for_model(names, num_classes=199)[0] is None
        assert number_for_model(names, num_classes=3)[1] == ("classes are numbered by folder name",)

    def test_order_of_names_for_as_many_classes(self) -> None:
        expected = {"cat": 0, "dog": 1, "emu": 2}
        assert number_for_model(NAMES, num_classes=3) == (expected, ("classes are numbered by folder name",))

    def test_order_of_the_dataset_for_as_many_classes(self) -> None:
        order = ["emu", "dog", "cat", "gnu"]
        expected = {"emu": 0, "dog": 1, "cat": 2, "gnu": 3}
        assert number_for_model(NAMES, num_classes=4, order=order)[0] == expected
        assert number_for_model(NAMES, num_classes=3, order=order)[0] is None

    @pytest.mark.parametrize("num_classes", [2, 4, 1000])
    def test_undetermined_otherwise(self, num_classes: int) -> None:
        class_to_idx, (note,) = number_for_model(NAMES, num_classes=num_classes)
        assert class_to_idx is None
        assert f"3 classes of images cannot determine the model's {num_classes} classes" in note
        assert "--classes" in note


def test_targets_need_an_index_for_every_class() -> None:
    class_to_idx = number_classes(NAMES)
    assert encode_targets(NAMES, class_to_idx, source="pets", cure="").tolist() == [0, 0, 1, 2]
    with pytest.raises(MctfError, match="class 'gnu' of pets is not in the table"):
        encode_targets(["gnu"], class_to_idx, source="pets", cure="is not in the table")


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
        (b"0\t\xff\xfe\n", "is not UTF-8 text"),
    ],
)
def test_malformed_table(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(MctfError, match=message):
        read_class_table(write_table(tmp_path, content), num_classes=3)


def test_missing_table(tmp_path: Path) -> None:
    with pytest.raises(MctfError, match="there is no class table"):
        read_class_table(tmp_path / "nowhere.tsv")
