"""Arbitrary text, bytes and values through every parser: a value or MctfError, nothing else, in bounded time."""

import io
import json
import math
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from mctf import MctfError
from mctf._utils import parse_image_size
from mctf.cli.bench import parse_batches
from mctf.cli.compare import parse_targets
from mctf.cli.options import parse_names, parse_options, parse_reductions
from mctf.core.schedule import make_schedule, parse_blocks, parse_r, read_blocks
from mctf.data.labels import read_class_table
from mctf.errors import did_you_mean, one_line, shown
from mctf.methods import _REGISTRY, make_method
from mctf.models.state_dict import read_state_dict
from mctf.reproduce.records import Records
from mctf.reproduce.runner import experiments
from mctf.train.config import Recipe, read_recipe, read_toml

Record = Callable[[str, object], None]
EXAMPLES = 150
SECONDS = 2.0  # for one input; most take microseconds

# text that parsers meet: digits of all scripts, signs, separators and control characters among anything else
TEXT = st.one_of(
    st.text(max_size=50),
    st.text(alphabet="0123456789.,-+eExX_ naifst\"'[]{}=\n\t\0\x1b٣🦊\ud800", max_size=30),
    st.integers().map(str),
    st.floats().map(str),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.fractions(),
    st.decimals(),
    TEXT,
    st.binary(max_size=10),
    st.sampled_from([10**400, -(10**400), 10**4299, Fraction(10**400, 3), Fraction(1, 10**400), torch.tensor(3), ...]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.tuples(inner, inner), st.dictionaries(TEXT, inner, max_size=3)
    ),
    max_leaves=8,
)


@contextmanager
def bounded() -> Iterator[None]:
    """Refuses, or gives, within SECONDS; MctfError is one bounded line."""
    start = time.perf_counter()
    try:
        yield
    except MctfError as refusal:
        text = str(refusal)
        assert text == one_line(text)
        assert "\n" not in text
        assert len(text) < 3000  # a recipe is refused with all of its problems
    assert time.perf_counter() - start < SECONDS


@pytest.fixture(autouse=True)
def _count(request: pytest.FixtureRequest, record_property: Record) -> None:
    if getattr(request.function, "is_hypothesis_test", False):
        record_property("cases", ["parsers", EXAMPLES])


def fuzz(strategy: Any) -> Callable[[Any], Any]:
    def decorate(test: Any) -> Any:
        return settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.generate])(given(strategy)(test))

    return decorate


@fuzz(VALUES)
@example("1" * 5000)
@example("1," * 5000)
@example([float("nan")] * 4)
@example("fast,fast")
def test_parse_r(value: Any) -> None:
    with bounded():
        r = parse_r(value)
        amounts = r if isinstance(r, tuple) else [r]
        assert all(amount == "fast" or 0 <= amount < 2**31 for amount in amounts)  # type: ignore[operator]


@fuzz(VALUES)
@example(iter(int, 1))
@example("1" * 5000)
def test_parse_blocks(value: Any) -> None:
    with bounded():
        assert all(isinstance(block, int) for block in parse_blocks(value))


@fuzz(st.tuples(VALUES, VALUES, st.integers(0, 40)))
def test_make_schedule(case: tuple[Any, Any, int]) -> None:
    r, blocks, depth = case
    with bounded():
        schedule = make_schedule(r, depth=depth, blocks=read_blocks(blocks), default_blocks=range(1, depth))
        assert len(schedule) == depth
        assert all(type(amount) is int or 0 <= amount < 1 for amount in schedule)
        assert all(amount >= 0 and math.isfinite(amount) for amount in schedule)


@fuzz(VALUES)
@example("9" * 5000)
@example((1, 10**400))
def test_parse_image_size(value: Any) -> None:
    with bounded():
        height, width = parse_image_size(value)
        assert 1 <= min(height, width) <= max(height, width) <= 65_536


@fuzz(st.lists(TEXT | st.tuples(TEXT, TEXT).map("=".join), max_size=3))
@example(["a=" + "[" * 20_000])
@example(["a=" + "{a=" * 20_000])
@example(["a=1\nb=2"])
@example(["a=\ud800"])
def test_parse_options(pairs: list[str]) -> None:
    with bounded():
        options = parse_options(pairs)
        for method in _REGISTRY:
            with bounded():
                make_method(method, options)


@fuzz(TEXT)
@example("1e400")
@example("nan")
@example("9" * 5000)
def test_lists_of_numbers(text: str) -> None:
    with bounded():
        assert all(0 < target < math.inf for target in parse_targets(text))
    with bounded():
        assert all(batch >= 1 for batch in parse_batches(text))
    with bounded():
        assert parse_reductions(text)
    assert all(name == name.strip() for name in parse_names(text))


@fuzz(st.tuples(VALUES.filter(lambda value: isinstance(value, str)) | TEXT, st.lists(TEXT, max_size=5)))
def test_did_you_mean(case: tuple[str, list[str]]) -> None:
    with bounded():
        assert did_you_mean(*case)


@fuzz(VALUES)
def test_shown(value: Any) -> None:
    assert len(shown(value)) <= 80
    assert shown(value) == one_line(shown(value))


NAMES = [each.name for each in fields(Recipe)]


@fuzz(st.dictionaries(st.sampled_from(NAMES) | TEXT, VALUES, max_size=4))
def test_read_recipe(values: dict[str, Any]) -> None:
    with bounded():
        read_recipe(values)
    with bounded():
        read_recipe({"model": "embedded_small", "data": "/", **values})


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_a_recipe(name: str, record_property: Record) -> None:
    for value in (
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        -1,
        10**18,
        2**63,
        True,
        "",
        "x",
        "a\nb",
        None,
        [],
        [[1]],
        {},
    ):
        with bounded():
            read_recipe({"model": "embedded_small", "data": "/", name: value})
    record_property("cases", ["parsers", 15])


@fuzz(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40))
@example("my run 🦊")
@example("\"quotes\" and 'quotes' and \\ and \x7f")
@example("new\nline\r\n\ttab ")
@example("\x85\u2028")
def test_recipes_round_trip(text: str) -> None:
    recipe = Recipe(model="embedded_small", data="/", output=f"a{text}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_text(recipe.as_toml(), encoding="utf-8", newline="")
        assert read_recipe(read_toml(path)) == recipe


@contextmanager
def file_of(content: bytes, name: str = "file") -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        yield path


BYTES = st.one_of(st.binary(max_size=300), TEXT.map(lambda text: text.encode("utf-8", "surrogatepass")))


@fuzz(BYTES)
@example(b"a = " + b"[" * 20_000)
@example(b"a = " + b"{a = " * 20_000)
@example(b"a" + b".a" * 2_000 + b" = 1")
@example(b"\xff\xfe")
def test_read_toml(content: bytes) -> None:
    with file_of(content) as path, bounded():
        read_toml(path)


@fuzz(
    BYTES
    | st.lists(st.tuples(TEXT, TEXT).map("\t".join), max_size=4).map(
        lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass")
    )
)
@example(b"9" * 5000 + b"\ta\n")
@example("٣\ta\n".encode())
def test_class_tables(content: bytes) -> None:
    with file_of(content) as path, bounded():
        assert all(0 <= index < 1000 for index in read_class_table(path, num_classes=1000).values())


def saved(**options: Any) -> bytes:
    file = io.BytesIO()
    torch.save({"a.weight": torch.ones(3, 4), "b": torch.zeros(2)}, file, **options)
    return file.getvalue()


WEIGHTS = {
    "archive": saved(),
    "legacy": saved(_use_new_zipfile_serialization=False),
    "safetensors": save({"a.weight": torch.ones(3, 4), "b": torch.zeros(2)}),
}


@fuzz(
    st.binary(max_size=400)
    | st.tuples(st.sampled_from([b"PK\x03\x04", b"\x80\x02", b"\x10\0\0\0\0\0\0\0{"]), st.binary(max_size=200)).map(
        b"".join
    )
)
def test_state_dicts_of_any_bytes(content: bytes) -> None:
    for name in ("a.pth", "a.safetensors"):
        with file_of(content, name) as path, bounded():
            assert all(isinstance(value, torch.Tensor) for value in read_state_dict(path).values())


@pytest.mark.parametrize("kind", WEIGHTS)
def test_damaged_state_dicts(kind: str, record_property: Record) -> None:
    """Bytes changed, removed, repeated and inserted at random: tensors by name, or one line."""
    chance = random.Random(kind)
    whole = WEIGHTS[kind]
    tracemalloc.start()
    for _ in range(EXAMPLES):
        content = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 8])):
            start = chance.randrange(len(content))
            stop = start + chance.choice([1, 1, 4, 40])
            content[start:stop] = (
                chance.choice([chance.randbytes(stop - start), b"", content[start:stop] * 3, b"\xff" * (stop - start)])
                or b""
            )
            content = content or bytearray(b"\0")
        with file_of(bytes(content)) as path, bounded():
            state = read_state_dict(path)
            assert all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in state.items())
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()
    record_property("cases", ["parsers", EXAMPLES])


@pytest.mark.parametrize("kind", WEIGHTS)
def test_truncated_state_dicts(kind: str) -> None:
    whole = WEIGHTS[kind]
    for length in range(0, len(whole), max(1, len(whole) // 60)):
        with file_of(whole[:length]) as path, pytest.raises(MctfError):
            read_state_dict(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("experiment", "conditions", "seconds", "date", "result", "form")


@settings(max_examples=60)
@given(
    st.one_of(
        BYTES,
        JSON.map(lambda value: json.dumps(value).encode()),
        st.fixed_dictionaries(dict.fromkeys(FIELDS, JSON)).map(lambda value: json.dumps(value).encode()),
        st.fixed_dictionaries(
            {**dict.fromkeys(FIELDS, JSON), "conditions": st.just({}), "form": st.integers(1, 3)}
        ).map(lambda value: json.dumps(value).encode()),
    )
)
@example(b"[" * 100_000)
@example(b"9" * 5000)
def test_records(content: bytes) -> None:
    for experiment in experiments()[:3]:
        with tempfile.TemporaryDirectory() as folder:
            records = Records(Path(folder), {})
            path = records._path(experiment)
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
            with bounded():
                records.check([experiment])
            with bounded():
                records.load(experiment)
            with bounded():
                Records.at(Path(folder), None, experiments())
