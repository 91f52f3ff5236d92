"""Numbers as people say them."""

import pytest

from mctf._utils import format_blocks, format_counts, plural
from mctf.cli.tables import run_title


@pytest.mark.parametrize(("number", "words"), [(0, "0 images"), (1, "1 image"), (2, "2 images"), (11, "11 images")])
def test_one_is_not_many(number: int, words: str) -> None:
    assert plural(number, "image") == words


def test_a_plural_of_its_own() -> None:
    assert [plural(number, "class", "classes") for number in (1, 3)] == ["1 class", "3 classes"]


def test_the_title_of_a_measurement_speaks_of_one_image() -> None:
    facts = {"model": "embedded", "images": 1, "data": "cats", "device": "cpu", "dtype": "float32"}
    assert run_title(facts) == "embedded on 1 image of cats, cpu, float32"
    assert run_title(facts | {"images": 12}).startswith("embedded on 12 images of cats")


@pytest.mark.parametrize(
    ("blocks", "words"),
    [([3], "block 3"), ([3, 4], "blocks 3 to 4"), ([0, 1, 2], "blocks 0 to 2"), ([3, 6], "blocks 3, 6")],
)
def test_names_of_blocks(blocks: list[int], words: str) -> None:
    assert format_blocks(blocks) == words


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([7], "7"),
        ([7, 7], "7"),
        ([9, 9, 9, 9], "9"),
        ([18, 9, 0], "18, 9, 0"),
        ([18, 0, 0], "18, 0, 0"),
        ([18, 0, 0, 0], "18, then 0"),
        ([0, 18, 0, 0, 0], "0, 18, then 0"),
        ([1, 1, 1, 2], "1, 1, 1, 2"),
    ],
)
def test_many_equal_numbers_at_the_end_are_said_once(numbers: list[int], words: str) -> None:
    assert format_counts(numbers) == words
