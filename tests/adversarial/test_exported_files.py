"""Bad files for mctf.load_exported: MctfError in one line, and no code of a pickle runs."""

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mctf
from helpers.exporting import tiny
from mctf.data import Preprocessing
from mctf.deploy.metadata import ExportMetadata

Record = Callable[[str, object], None]
Change = Callable[[dict[str, bytes]], object]


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A file of torch.export: content by the name of the entry."""
    path = tmp_path_factory.mktemp("pt2") / "tiny.pt2"
    mctf.export(tiny(depth=1), path, "pt2", check=False)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(path: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def pickled(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def use_pickle(entries: dict[str, bytes], evil: bytes) -> None:
    name = "tiny/data/weights/model_weights_config.json"
    config = json.loads(entries[name])
    first = next(iter(config["config"].values()))
    first["use_pickle"] = True
    entries[name] = json.dumps(config).encode()
    entries[f"tiny/data/weights/{first['path_name']}"] = evil


EVIL: dict[str, Callable[[dict[str, bytes], bytes], object]] = {
    "sample_inputs": lambda entries, evil: entries.update({"tiny/data/sample_inputs/model.pt": evil}),
    "a_weight": use_pickle,
    "weights_of_an_older_format": lambda entries, evil: entries.update({"tiny/data/weights/model.pt": evil}),
    "constants_of_an_older_format": lambda entries, evil: entries.update({"tiny/data/constants/model.pt": evil}),
    "a_custom_object": lambda entries, evil: entries.update({"tiny/data/constants/opaque_obj_0": evil}),
    "a_file_of_torch_2_7": lambda entries, evil: entries.update(
        {"version": b"8.8", "serialized_state_dict.pt": evil, "serialized_example_inputs.pt": evil}
    ),
}


@pytest.mark.parametrize("case", EVIL)
def test_no_pickle_of_a_pt2_file_runs(
    case: str, entries: dict[str, bytes], tmp_path: Path, record_property: Record
) -> None:
    ran, changed = tmp_path / "ran", dict(entries)
    EVIL[case](changed, pickled((Evil(ran),)))
    with pytest.raises(mctf.MctfError, match=r"holds Python objects, which could run code|cannot be loaded as pt2"):
        mctf.load_exported(write(tmp_path / "tiny.pt2", changed))
    assert not ran.exists()
    record_property("cases", ["exported", 1])


def test_the_evil_file_would_run(entries: dict[str, bytes], tmp_path: Path) -> None:
    ran, changed = tmp_path / "ran", dict(entries)
    EVIL["sample_inputs"](changed, pickled((Evil(ran),)))
    with pytest.raises(Exception):  # noqa: B017, PT011 - torch raises whatever the objects lead to
        torch.export.load(write(tmp_path / "tiny.pt2", changed)).module()(torch.zeros(0))
    assert ran.exists()


NONSENSE: list[Any] = [
    None, True, -1, 0, 1e400, 10**400, "x", "a\nb\x1b[31m", "x" * 10_000, [], [[1]], {}, {"a": [1]}, ["x"] * 6, [1, 1],
]  # fmt: skip
IMAGES = torch.zeros(1, 3, 64, 64)


def reload(entries: dict[str, bytes], path: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """The file with other metadata is refused in one line, or computes something; gives the line."""
    facts = json.loads(entries["tiny/extra/mctf.json"])
    change(facts)
    write(path, entries | {"tiny/extra/mctf.json": json.dumps(facts).encode()})
    line = ""
    try:
        exported = mctf.load_exported(path)
        repr(exported)
        assert exported(IMAGES).isfinite().all()
    except mctf.MctfError as refusal:
        line = str(refusal)
    assert "\n" not in line
    assert len(line) < 2000
    return line


@pytest.mark.parametrize("key", [each.name for each in fields(ExportMetadata)])
def test_nonsense_in_the_metadata(
    key: str, entries: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    text = json.loads(entries["tiny/extra/mctf.json"])
    for value in NONSENSE:
        changed, line = json.dumps(text | {key: value}), ""
        try:
            facts = ExportMetadata.from_json(changed, "tiny.pt2")
        except mctf.MctfError as refusal:
            line = str(refusal)
        assert "\n" not in line
        assert len(line) < 2000
        if line:
            continue
        assert facts == ExportMetadata.from_json(facts.to_json(), "tiny.pt2")
        if facts.preprocessing is not None:
            facts.preprocessing.transform()
    record_property("cases", ["exported", len(NONSENSE)])


@pytest.mark.parametrize("key", [each.name for each in fields(Preprocessing)])
def test_nonsense_in_the_preprocessing(key: str, entries: dict[str, bytes], record_property: Record) -> None:
    text = json.loads(entries["tiny/extra/mctf.json"])
    whole = {"image_size": [64, 64], "crop_pct": 0.9, "crop_mode": "center", "interpolation": "bicubic"}
    whole |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    assert ExportMetadata.from_json(json.dumps(text | {"preprocessing": whole}), "tiny.pt2").preprocessing is not None
    for value in NONSENSE:
        with pytest.raises(mctf.MctfError, match="is damaged"):
            ExportMetadata.from_json(json.dumps(text | {"preprocessing": whole | {key: value}}), "tiny.pt2")
    record_property("cases", ["exported", len(NONSENSE)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": [32, 32]}, "does not run"),
        ({"class_names": ["cat", "dog"]}, "names 2 classes"),
        ({"class_names": [], "output": "embeddings"}, ""),
        ({"class_names": []}, "contradict each other"),
        ({"batch": 2}, "takes images of 2 x 3 x 64 x 64"),
        ({"fusion": {"version": 1}}, "is damaged"),
    ],
)
def test_metadata_that_does_not_fit_the_graph(
    change: dict[str, Any], message: str, entries: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.IMAGES", torch.zeros(1, 3, *change.get("image_size", (64, 64))))
    line = reload(entries, tmp_path / "tiny.pt2", lambda facts: facts.update(change))
    assert message in line
    assert bool(message) == bool(line)


def test_calls_that_are_refused(entries: dict[str, bytes], tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.pt2", entries)
    exported = mctf.load_exported(path)
    bad: Any
    for bad in ("x", None, [1], np.array(["x"]), torch.zeros(3), torch.zeros(1, 1, 64, 64)):
        with pytest.raises(mctf.MctfError, match=r"tiny\.pt2"):
            exported(bad)
    for threads in (0, -1, 1.5, True, "x"):
        with pytest.raises(mctf.MctfError, match=r"threads=.* must be a whole number"):
            mctf.load_exported(path, threads=threads)  # type: ignore[arg-type]
    with pytest.raises(mctf.MctfError, match=r"call torch.set_num_threads\(77\)"):
        mctf.load_exported(path, threads=77)
