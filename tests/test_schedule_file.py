"""Schedule files: written, read, used by fuse and plan, and refused where they do not fit."""

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mctf
from helpers.models import make
from helpers.refusals import assert_refused
from mctf.models.loading import create_empty
from mctf.schedule_file import Schedule, TunedElsewhereWarning, read_schedule

PLAIN = make("plain")
TOKENS = mctf.plan(PLAIN, r=0).image_tokens
DEPTH = len(PLAIN.blocks)
WIDTH, HEADS = PLAIN.embed_dim, PLAIN.blocks[0].attn.num_heads
GOOD = Schedule(
    method="ward",
    depth=DEPTH,
    tokens=TOKENS,
    protected=1,
    channels=WIDTH,
    heads=HEADS,
    r=(0, 5, 0, 3),
    options={"rounds": 2},
    kl=0.1,
)


@pytest.fixture
def model() -> Any:
    return make("plain")


def test_a_file_is_read_as_it_was_written(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    GOOD.write(path)
    assert read_schedule(path) == read_schedule(str(path)) == read_schedule(json.loads(path.read_text())) == GOOD
    assert os.listdir(tmp_path) == ["schedule.json"]
    mctf.fuse(model, schedule=path)
    assert (model.blocks.r, model.blocks.method.name, model.blocks.method.rounds) == (GOOD.r, "ward", 2)
    assert mctf.plan(make("plain"), schedule=GOOD.as_dict()).r == GOOD.r
    mctf.unfuse(model)
    mctf.fuse(model, "ward", schedule=path, rounds=2)


def test_where_it_comes_from_is_not_needed() -> None:
    needed = ("format", "version", "method", "depth", "tokens", "protected", "r")
    facts = {name: value for name, value in GOOD.as_dict().items() if name in needed}
    assert read_schedule(facts | {"something": "else"}).r == GOOD.r


CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"format": "another"}, "its format is 'another'"),
    ({"format": None}, "its format is None"),
    ({"version": 2}, "has version 2, and this mctf reads version 1"),
    ({"version": True}, "has version True"),
    ({"version": "1"}, "has version '1'"),
    ({"method": 3}, "its method is 3"),
    ({"method": "warp"}, "did you mean 'ward'"),
    ({"options": []}, "its options is []"),
    ({"options": {"bogus": 1}}, "has no option 'bogus'"),
    ({"options": {"rounds": -1}}, "rounds=-1"),
    ({"depth": None}, "its depth is None"),
    ({"depth": 12}, "its r has 4 entries for depth 12"),
    ({"depth": 2, "r": [1, 2]}, "for 2 blocks"),
    ({"tokens": TOKENS + 1}, f"for {TOKENS + 1} tokens, but"),
    ({"tokens": TOKENS + 1}, f"has {TOKENS}: tune one"),
    ({"tokens": 1.5}, "its tokens is 1.5"),
    ({"protected": 2}, "for 2 protected tokens"),
    ({"protected": -1}, "its protected is -1"),
    ({"channels": 2 * WIDTH}, f"for {2 * WIDTH} channels, but"),
    ({"heads": HEADS + 1}, f"for {HEADS + 1} heads, but"),
    ({"channels": 0}, "its channels is 0"),
    ({"heads": "3"}, "its heads is '3'"),
    ({"r": 16}, "its r is 16"),
    ({"r": "fast"}, "its r is 'fast'"),
    ({"r": [0, -5, 0, 3]}, "r=-5 is negative"),
    ({"r": [0, float("nan"), 0, 3]}, "r=nan is neither"),
    ({"r": [0, float("inf"), 0, 3]}, "r=inf is neither"),
    ({"r": [0, 1.5, 0, 3]}, "r=1.5 is neither"),
    ({"r": [0, 1.0, 0, 3]}, "r=1.0 is neither"),
    ({"r": [0, "5", 0, 3]}, "must be a number"),
    ({"r": [0, None, 0, 3]}, "must be a number"),
    ({"r": [0, True, 0, 3]}, "must be a number"),
    ({"r": [0, [5], 0, 3]}, "must be a number"),
    ({"r": []}, "its r has 0 entries"),
    ({"r": [10**40, 5, 0, 3]}, "more tokens than a model can have"),
]


@pytest.mark.parametrize(("change", "says"), CHANGED, ids=[says for _, says in CHANGED])
def test_another_content_is_refused(model: Any, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    facts = GOOD.as_dict() | change
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(facts))
    for source in (facts, path):
        assert_refused(model, says, lambda source=source: mctf.fuse(model, schedule=source))  # type: ignore[misc]
        assert_refused(model, says, lambda source=source: mctf.plan(model, schedule=source))  # type: ignore[misc]


def test_what_is_no_schedule_file(model: Any, tmp_path: Path) -> None:
    contents = {
        "empty": b"",
        "text": b"not JSON\n",
        "binary": bytes(range(256)) * 10,
        "list": b"[1, 2]",
        "number": b"1" * 5000,
        "half": json.dumps(GOOD.as_dict()).encode()[:100],
        "deep": b"[" * 100_000,
        "utf16": json.dumps({"format": "é"}, ensure_ascii=False).encode("latin-1"),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(10**10)
    os.mkfifo(tmp_path / "fifo")
    names = [*contents, "huge", "fifo", "nowhere", ".", "a\0b", "x" * 5000]
    for source in [tmp_path / name for name in names] + ["/dev/zero", "", b"bytes", 3, float("nan"), [GOOD.r]]:
        assert_refused(model, "schedule", lambda source=source: mctf.fuse(model, schedule=source))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"r": 3}, "leave out r=3"),
        ({"flops": 0.5}, "leave out flops=0.5"),
        ({"blocks": [1]}, "leave out blocks=(1,)"),
        ({"method": "mctf"}, "for method 'ward', not 'mctf'"),
        ({"method": 3}, "for method 'ward', not 3"),
        ({"rounds": 3}, "leave out 'rounds'"),
    ],
)
def test_contradictions_are_refused(model: Any, given: dict[str, Any], says: str) -> None:
    assert_refused(model, says, lambda: mctf.fuse(model, schedule=GOOD, **given))
    assert_refused(model, says, lambda: mctf.plan(model, schedule=GOOD, **given))


def test_another_model_of_the_same_shape_is_named() -> None:
    (name, *_) = mctf.schedules()
    schedule = read_schedule(name)
    with pytest.warns(TunedElsewhereWarning, match="tuned for 'deit_tiny_patch16_224', not vit_tiny_patch16_224"):
        mctf.plan("vit_tiny_patch16_224", schedule=name)
    with pytest.raises(mctf.MctfError, match=r"for 192 channels .*deit_small_patch16_224 has 384"):
        mctf.plan("deit_small_patch16_224", schedule=name)
    with warnings.catch_warnings(action="error"):
        for model in (schedule.model, f"{schedule.model}.fb_in1k", "hf:facebook/deit-tiny-patch16-224", None):
            mctf.plan(schedule.model, schedule=replace(schedule, model=model))


def test_another_image_size_is_refused(model: Any) -> None:
    with pytest.raises(mctf.MctfError, match=f"for {TOKENS} tokens"):
        mctf.plan("deit_tiny_patch16_224", schedule=replace(GOOD, depth=12, r=(1,) * 12))


@pytest.mark.parametrize("name", mctf.schedules())
def test_schedules_of_the_package_fit_the_models_they_name(name: str) -> None:
    schedule = read_schedule(name)
    assert schedule == read_schedule(Path(name)), "as a command gives it"
    assert name.startswith(schedule.model), "named by the model, then by the budget"
    plan = mctf.plan(create_empty(schedule.model), schedule=name)
    assert plan.gflops / plan.gflops_base == pytest.approx(schedule.flops, abs=1e-4)
    assert round(100 * schedule.flops) == int(name.rpartition("-flops")[2])


def test_a_file_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (name, *_) = mctf.schedules()
    monkeypatch.chdir(tmp_path)
    GOOD.write(Path(name))
    assert read_schedule(name) == GOOD
    with pytest.raises(
        mctf.MctfError, match=f"there is no schedule 'deit_tiny_patch16-flops78'.*did you mean '{name}'"
    ):
        read_schedule("deit_tiny_patch16-flops78")
