"""Bad files for mctf.load_exported: MctfError in one line, and no code of a pickle runs."""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mctf
from helpers.exporting import tiny

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
    with pytest.raises(mctf.MctfError, match="holds Python objects, which could run code|cannot be loaded as pt2"):
        mctf.load_exported(write(tmp_path / "tiny.pt2", changed))
    assert not ran.exists()
    record_property("cases", ["exported", 1])


def test_the_evil_file_would_run(entries: dict[str, bytes], tmp_path: Path) -> None:
    ran, changed = tmp_path / "ran", dict(entries)
    EVIL["sample_inputs"](changed, pickled((Evil(ran),)))
    with pytest.raises(Exception):  # noqa: B017 - torch raises whatever the objects lead to
        torch.export.load(write(tmp_path / "tiny.pt2", changed)).module()(torch.zeros(0))
    assert ran.exists()
