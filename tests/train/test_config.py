"""Recipes: parsed from files and text, refused with everything that is wrong, written and read back."""

import math
import os
import shlex
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mctf import MctfError
from mctf.schedule_file import Schedule
from mctf.train.build import resume_command
from mctf.train.config import Recipe, read_recipe, read_toml

BASIC = {"model": "test_vit", "data": "images"}


def refusal(**values: Any) -> str:
    with pytest.raises(MctfError) as caught:
        read_recipe(BASIC | values)
    return str(caught.value)


def test_text_and_typed_values_are_equivalent() -> None:
    typed = {"r": 0.35, "lr": 1, "batch": 8, "image_size": [96, 128], "blocks": [3, 6], "evaluate_r": [0, 16, "fast"]}
    text = {"r": "0.35", "lr": "1", "batch": "8", "image_size": "96x128", "blocks": "3,6", "evaluate_r": "0, 16,fast"}
    assert read_recipe(BASIC | typed) == read_recipe(BASIC | text)
    assert read_recipe(BASIC | text).image_size == (96, 128)


@pytest.mark.parametrize(
    ("given", "parsed"),
    [("16", 16), ("1e-1", 0.1), ("fast", "fast"), ([0, 4, 0.5], (0, 4, 0.5)), ("0,4", (0, 4))],
)
def test_r_accepts_what_fuse_accepts(given: Any, parsed: Any) -> None:
    assert read_recipe(BASIC | {"r": given}).r == parsed


def test_all_errors_are_reported_at_once() -> None:
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
        ({"lr": math.inf}, "lr = inf: expected a number above 0"),
        ({"lr": "nan"}, "lr = 'nan': expected a number above 0"),
        ({"smoothing": 1.5}, "smoothing = 1.5: expected a number 0 or more, at most 1"),
        ({"color_jitter": 1}, "color_jitter = 1: expected a number 0 or more, below 1"),
        ({"smallest_crop": 0.5, "augmentation": "none"}, "smallest_crop needs random crops: choose augmentation"),
        ({"color_jitter": 0.3, "augmentation": "none"}, "color_jitter is part of the random augmentation"),
        ({"r": [0, 8], "blocks": [1]}, "r has one amount per block: omit blocks"),
        ({"r": -1}, "r=-1 is negative"),
        ({"r": "lots"}, "'lots'"),
        ({"evaluate_r": ""}, "evaluate_r = '': "),
        ({"evaluate_r": [[1, 2]]}, "expected several r"),
        ({"blocks": "a"}, "blocks 'a' is not a list of block numbers"),
        ({"image_size": "1x2x3"}, "image size '1x2x3' is not a size"),
        ({"image_size": ""}, "image size '' is not a size"),
        ({"method_options": 3}, "expected a table"),
        ({"method": "mctv"}, "unknown method 'mctv': did you mean 'mctf'"),
        ({"method_options": {"poling": "size"}}, "has no option 'poling': did you mean 'pooling'"),
        ({"method": "none"}, "consistency compares two amounts of fusion"),
        ({"r": 0}, "consistency compares two amounts of fusion"),
        ({"lighter_r": 17}, "lighter_r = 17 is above r = 16"),
        ({"lighter_r": 3, "r": "fast"}, "lighter_r is a number of tokens"),
        ({"method": "none", "objective": "cross-entropy", "blocks": "3"}, "belong to a method that fuses"),
        ({"warmup_epochs": 30}, "warmup_epochs = 30 takes all of epochs = 30"),
        ({"min_lr": 1.0}, "min_lr = 1 is above lr"),
        ({"teacher_weights": __file__}, "teacher_weights without a teacher"),
        ({"weights": __file__, "random_weights": True}, "exclude each other"),
        ({"model": "hf:google/vit"}, "model = 'hf:google/vit': only timm models can be fine-tuned"),
        ({"output": "runs/\udcff"}, "expected text in UTF-8"),
        ({"seed": 2**63}, "seed = 9223372036854775808: expected a whole number, at most 9223372036854775807"),
        ({"seed": "9" * 5000}, "seed = '999"),
        ({"seed": -1}, "seed = -1: expected a whole number, 0 or more"),
        ({"epochs": 10**18}, "expected a whole number, at most 1000000"),
        ({"batch": 10**30}, "expected a whole number, at most"),
        ({"lr": 10**400}, "expected a number above 0, at most 1000"),
        ({"lr": 1e300}, "expected a number above 0, at most 1000"),
        ({"repeated": 10**6}, "repeated = 1000000: expected a whole number, at most 1000"),
        ({"ema": 1}, "ema = 1: expected a number 0 or more, below 1"),
        ({"clip": 10**400}, "expected a number above 0"),
        ({"lr": 5e-324, "min_lr": 0}, "lr = 4.94066e-324 is too far below layers_lr"),
        ({"weights": "a\0b"}, "weights = 'a\\x00b': "),
        ({"weights": "x" * 5000}, "it cannot be a path (File name too long)"),
        ({"data": "a\0b"}, "expected text without null characters"),
        ({"data": " "}, "expected a name"),
        ({"model": ["a"] * 10000}, "model = ['a', 'a', 'a', 'a', 'a', 'a', ...]: expected a name"),
    ],
)
def test_invalid_values_are_refused(values: dict[str, Any], message: str) -> None:
    text = refusal(**values)
    assert message in text
    assert len(text) < 600


def test_unknown_names_are_not_answered_by_all_fifty_names() -> None:
    assert refusal(frobnicate=1) == "there is no option frobnicate: mctf finetune --help lists all options"
    text = refusal(**{f"x{index}" * 100: 1 for index in range(1000)})
    assert text.endswith("; and 990 more problems")
    assert len(text) < 2000


@given(
    st.dictionaries(
        st.sampled_from([each.name for each in fields(Recipe)]),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.text(max_size=5),
            st.sampled_from([10**400, -(10**400), "9" * 5000, "1e999", "-0", "0x1", "nan", b"", {}, [[]], {"a": {}}]),
            st.lists(st.integers(), max_size=3),
        ),
        max_size=4,
    )
)
@settings(max_examples=150)
def test_any_values_are_accepted_or_refused(values: dict[str, Any]) -> None:
    try:
        recipe = read_recipe(BASIC | values)
    except MctfError:
        return
    assert read_recipe(tomllib.loads(recipe.as_toml())) == recipe


def test_the_unfused_model_trains_by_cross_entropy() -> None:
    for values in ({"method": "none"}, {"r": 0}):
        read_recipe(BASIC | values | {"objective": "cross-entropy"})


def test_the_old_spelling_of_color_is_accepted() -> None:
    assert read_recipe(BASIC | {"colour_jitter": 0.3}).color_jitter == 0.3


class TestToml:
    @pytest.mark.parametrize(
        "name",
        [
            "plain",
            'a "quoted" name',
            "it's",
            "\U0001f600",
            "new\nline",
            "\x7f\x01\t",
            "C:\\dir\\n",
            "# [x] = ",
            "ü $(x) ;",
            " spaces ",
            "--help",
        ],
    )
    def test_any_path_survives(self, tmp_path: Path, name: str) -> None:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        recipe = read_recipe(BASIC | {"output": folder / "out", "data": name, "validation": folder})
        path = folder / "recipe.toml"
        path.write_text(recipe.as_toml(), encoding="utf-8", newline="")
        assert read_recipe(read_toml(path)) == recipe
        config = shlex.split(resume_command(folder, world_size=2))[-2]
        assert read_recipe(read_toml(Path(config))) == recipe

    def test_values_survive(self, tmp_path: Path) -> None:
        options = {"pooling": "size", "tau_sim": 0.5, "bidirectional": False}
        recipe = read_recipe(
            BASIC
            | {"output": tmp_path, "r": [0, 2, 3], "method_options": options | {"tau_info": None}, "lr": 1e-5}
            | {"clip": 1e22, "classes": __file__, "compile": True, "image_size": 96, "evaluate_r": [0, 0.5, "fast"]}
        )
        assert recipe.method_options == options
        path = tmp_path / "recipe.toml"
        path.write_text(recipe.as_toml())
        assert read_recipe(read_toml(path)) == recipe

    def test_infinity_and_nan_have_the_spelling_of_toml(self, tmp_path: Path) -> None:
        recipe = read_recipe(BASIC)
        object.__setattr__(recipe, "method_options", {"a": math.inf, "b": -math.inf, "c": math.nan})
        path = tmp_path / "recipe.toml"
        path.write_text(recipe.as_toml())
        options = read_toml(path)["method_options"]
        assert (options["a"], options["b"], math.isnan(options["c"])) == (math.inf, -math.inf, True)

    def test_hyphens_count_as_underscores(self, tmp_path: Path) -> None:
        path = tmp_path / "recipe.toml"
        path.write_text('model = "test_vit"\ndata = "x"\nweight-decay = 0.1\ncolour-jitter = 0.3\n')
        recipe = read_recipe(read_toml(path))
        assert (recipe.weight_decay, recipe.color_jitter) == (0.1, 0.3)

    @pytest.mark.parametrize("content", [b"a = ", b"\xff\xfe", b"seed = " + b"9" * 5000, bytes(range(256)), b"\0"])
    def test_other_files_are_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "recipe.toml"
        path.write_bytes(content)
        with pytest.raises(MctfError, match="is not a TOML file"):
            read_toml(path)
        with pytest.raises(MctfError, match="cannot be read"):
            read_toml(tmp_path / "nowhere.toml")

    @pytest.mark.parametrize(("make", "words"), [(os.mkdir, "is a folder"), (os.mkfifo, "is a pipe or device")])
    def test_other_kinds_of_files_are_refused(self, tmp_path: Path, make: Any, words: str) -> None:
        make(tmp_path / "recipe.toml")
        with pytest.raises(MctfError, match=f"recipe.toml {words}: give a TOML file of options"):
            read_toml(tmp_path / "recipe.toml")
        with pytest.raises(MctfError, match="/dev/zero is a pipe or device"):
            read_toml(Path("/dev/zero"))
        with pytest.raises(MctfError, match="null"):
            read_toml(Path("a\0b"))

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"#" * 1_000_001, "has more than 1,000,000 bytes"),
            (b"a = " + b"[" * 100_000, "is nested too deeply"),
            (b"[method_options." + b"a." * 3000 + b"a]", "nested too deeply"),
        ],
    )
    def test_huge_and_deep_files_are_refused(self, tmp_path: Path, content: bytes, words: str) -> None:
        path = tmp_path / "recipe.toml"
        path.write_bytes(content)
        with pytest.raises(MctfError, match=words):
            read_recipe(BASIC | read_toml(path))


def test_the_fingerprint_covers_what_the_weights_depend_on() -> None:
    recipe = read_recipe(BASIC)
    assert replace(recipe, output=Path("elsewhere"), log_steps=7, workers=3).fingerprint() == recipe.fingerprint()
    assert replace(recipe, lr=1e-4).fingerprint() != recipe.fingerprint()
    free = {each.name for each in fields(Recipe) if not each.metadata["affects_weights"]}
    assert free == {
        *("validation", "workers", "device", "threads", "output"),
        *("save_steps", "save_epochs", "keep", "log_steps", "evaluate_r"),
    }


@pytest.mark.parametrize(
    ("method", "r", "objective", "evaluate_r"),
    [
        ("mctf", 16, "consistency", (0, 4, 8, 12, 16, 20)),
        ("dynamic_vit", 0.3, "cross-entropy", (0, 0.3)),
        ("spvit", 0.34, "cross-entropy", (0, 0.34)),
        ("evo_vit", 0.5, "consistency", (0, 0.5)),
        ("a_vit", 1, "cross-entropy", (0, 1)),
    ],
)
def test_defaults_depend_on_the_method(method: str, r: Any, objective: str, evaluate_r: tuple[Any, ...]) -> None:
    recipe = read_recipe(BASIC | {"method": method})
    assert (recipe.r, recipe.objective, recipe.evaluate_r) == (r, objective, evaluate_r)
    chosen = read_recipe(BASIC | {"method": method, "r": 0.2, "evaluate_r": "0.2"})
    assert (chosen.r, chosen.evaluate_r) == (0.2, (0.2,))


def test_consistency_is_refused_for_methods_trained_for_one_r() -> None:
    message = refusal(method="dynamic_vit", objective="consistency")
    assert "dynamic_vit has a loss of its own, for one amount of fusion: omit objective" in message


def test_every_option_has_a_help_text() -> None:
    assert all(each.metadata["help"].endswith(".") for each in fields(Recipe))


RECIPES = sorted(Path(__file__).parents[2].glob("recipes/**/*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_of_the_repository_are_valid(path: Path) -> None:
    recipe = read_recipe(read_toml(path) | {"data": "images.zip"})
    assert recipe.model in path.read_text()


def test_a_budget_in_place_of_r(tmp_path: Path) -> None:
    recipe = read_recipe(BASIC | {"method": "ward", "flops": "0.56"})
    assert (recipe.r, recipe.flops, recipe.evaluate_r, recipe.method) == (None, 0.56, None, "ward")
    assert recipe.fingerprint()["flops"] == 0.56
    (tmp_path / "recipe.toml").write_text(recipe.as_toml())
    assert read_recipe(read_toml(tmp_path / "recipe.toml")) == recipe


def test_a_schedule_brings_its_method_and_options(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    schedule = Schedule(method="ward", depth=6, tokens=17, protected=1, r=(0, 2, 0, 1, 0, 0), options={"rounds": 2})
    schedule.write(path)
    recipe = read_recipe(BASIC | {"schedule": path})
    assert (recipe.method, recipe.method_options, recipe.r) == ("ward", {"rounds": 2}, None)
    (tmp_path / "recipe.toml").write_text(recipe.as_toml())
    assert read_recipe(read_toml(tmp_path / "recipe.toml")) == recipe
    before = recipe.fingerprint()
    replace(schedule, r=(0, 3, 0, 1, 0, 0)).write(path)
    assert recipe.fingerprint() != before, "the content of the file counts"
    assert "for method 'ward', not 'mctf'" in refusal(schedule=path, method="mctf")
    assert "leave out r=3" in refusal(schedule=path, r=3)
