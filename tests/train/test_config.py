"""Recipes: read from files and words, and refused with everything that is wrong."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from mctf import MctfError
from mctf.train.config import Recipe, read_recipe, read_toml

BASIC = {"model": "test_vit", "data": "images"}


def refusal(**values: Any) -> str:
    with pytest.raises(MctfError) as caught:
        read_recipe(BASIC | values)
    return str(caught.value)


def test_words_and_typed_values_mean_the_same() -> None:
    typed = {"r": 0.35, "lr": 1, "batch": 8, "image_size": [96, 128], "blocks": [3, 6], "evaluate_r": [0, 16, "fast"]}
    words = {
        "r": "0.35",
        "lr": "1",
        "batch": "8",
        "image_size": "96x128",
        "blocks": "3,6",
        "evaluate_r": "0, 16,fast",
    }
    words["evaluate_r"] = "0,16,fast"
    assert read_recipe(BASIC | typed) == read_recipe(BASIC | words)
    assert read_recipe(BASIC | words).image_size == (96, 128)


@pytest.mark.parametrize(
    ("given", "meant"), [("16", 16), ("fast", "fast"), ([0, 4, 0.5], (0, 4, 0.5)), ("0,4", (0, 4))]
)
def test_r_is_what_fuse_takes(given: Any, meant: Any) -> None:
    assert read_recipe(BASIC | {"r": given}).r == meant


def test_all_that_is_wrong_is_said_at_once() -> None:
    message = refusal(
        model="", batch=0, lr="fast", augmentation="week", compile="yes", wieghts="x", weights="nowhere.pt"
    )
    for part in (
        "model is missing: pass --model, or write model = … into the file of --config",
        "batch = 0: expected a whole number, 1 or more",
        "lr = 'fast': expected a number above 0",
        "augmentation = 'week': did you mean 'weak'?",
        "compile = 'yes': expected true or false",
        "there is no option wieghts: did you mean 'weights'?",
        "weights = 'nowhere.pt': there is no such file or folder",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": True}, "batch = True: expected a whole number"),
        ({"batch": 1.5}, "batch = 1.5: expected a whole number"),
        ({"smoothing": 1.5}, "smoothing = 1.5: expected a number 0 or more, at most 1"),
        ({"r": -1}, "r=-1 is negative"),
        ({"r": "lots"}, "'lots' is no known preset"),
        ({"evaluate_r": ""}, "evaluate_r"),
        ({"evaluate_r": [[1, 2]]}, "expected several r"),
        ({"blocks": "a"}, "expected numbers of blocks"),
        ({"image_size": "1x2x3"}, "expected a size"),
        ({"method_options": 3}, "expected a table"),
        ({"method": "mctv"}, "unknown method 'mctv': did you mean 'mctf'"),
        ({"method_options": {"poling": "size"}}, "has no option 'poling': did you mean 'pooling'"),
        ({"method": "none"}, "consistency compares two amounts of fusing"),
        ({"r": 0}, "consistency compares two amounts of fusing"),
        ({"lighter_r": 17}, "lighter_r = 17 is above r = 16"),
        ({"lighter_r": 3, "r": "fast"}, "lighter_r counts tokens"),
        ({"method": "none", "objective": "cross-entropy", "blocks": "3"}, "belong to a method that fuses"),
        ({"warmup_epochs": 30}, "warmup_epochs = 30 leaves nothing of epochs = 30"),
        ({"min_lr": 1.0}, "min_lr = 1 is above lr"),
        ({"teacher_weights": __file__}, "teacher_weights without a teacher"),
        ({"weights": __file__, "random_weights": True}, "exclude each other"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], message: str) -> None:
    assert message in refusal(**values)


def test_a_plain_model_trains_by_cross_entropy() -> None:
    for values in ({"method": "none"}, {"r": 0}):
        read_recipe(BASIC | values | {"objective": "cross-entropy"})


class TestToml:
    def test_a_recipe_writes_itself_and_is_read_again(self, tmp_path: Path) -> None:
        made = read_recipe(
            BASIC
            | {"output": tmp_path, "r": [0, 2, 3], "method_options": {"pooling": "size", "tau_sim": 0.5}, "lr": 1e-5}
            | {"clip": 1.0, "classes": __file__, "data": 'a "quoted" name', "compile": True}
        )
        path = tmp_path / "recipe.toml"
        path.write_text(made.as_toml())
        assert read_recipe(read_toml(path)) == made

    def test_hyphens_count_as_underscores(self, tmp_path: Path) -> None:
        path = tmp_path / "recipe.toml"
        path.write_text('model = "test_vit"\ndata = "x"\nweight-decay = 0.1\n')
        assert read_recipe(read_toml(path)).weight_decay == 0.1

    @pytest.mark.parametrize(("content", "message"), [(b"a = ", "is no TOML file"), (b"\xff\xfe", "is no TOML file")])
    def test_other_files_are_refused(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = tmp_path / "recipe.toml"
        path.write_bytes(content)
        with pytest.raises(MctfError, match=message):
            read_toml(path)
        with pytest.raises(MctfError, match="cannot be read"):
            read_toml(tmp_path / "nowhere.toml")


def test_what_decides_a_run_is_all_but_where_and_how_it_is_kept() -> None:
    made = read_recipe(BASIC)
    assert replace(made, output=Path("elsewhere"), log_steps=7, workers=3).decisive() == made.decisive()
    assert replace(made, lr=1e-4).decisive() != made.decisive()
    free = {each.name for each in fields(Recipe) if not each.metadata["decides"]}
    assert free == {
        *("validation", "workers", "device", "threads", "output"),
        *("save_steps", "save_epochs", "keep", "log_steps", "evaluate_r"),
    }


@pytest.mark.parametrize(
    ("method", "expected"),
    [("mctf", (0, 4, 8, 12, 16, 20)), ("none", (0, 4, 8, 12, 16, 20)), ("dynamic_vit", (0, 0.3)), ("a_vit", (0, 1))],
)
def test_the_evaluation_at_the_end_suits_the_method(method: str, expected: tuple[float, ...]) -> None:
    objective = "cross-entropy"
    assert read_recipe({**BASIC, "method": method, "objective": objective}).evaluate_r == expected


def test_every_option_has_a_help_text() -> None:
    assert all(each.metadata["help"].endswith(".") for each in fields(Recipe))


RECIPES = sorted(Path(__file__).parents[2].glob("recipes/**/*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_of_the_repository_can_be_read(path: Path) -> None:
    recipe = read_recipe(read_toml(path) | {"data": "images.zip"})
    assert recipe.model in path.read_text()
