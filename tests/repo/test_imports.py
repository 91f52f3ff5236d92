"""What importing loads and registers: one fresh interpreter prints all facts as JSON."""

import json
import subprocess
import sys
from typing import Any

import pytest

PROBE = """
import contextlib, io, json, sys

HEAVY = ("torch", "timm", "numpy", "PIL", "transformers", "matplotlib", "tensorboard", "skimage")
facts = {}

def note(name, value=None):
    facts[name] = value if value is not None else [package for package in HEAVY if package in sys.modules]

import mctf
mctf.__version__, dir(mctf)
sys.argv = ["mctf", "--help"]
from mctf.cli import main
with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
    main()
note("help", "Usage" in printed.getvalue())
note("light")

import timm
OURS = ["embedded", "lvvit*", "t2t_vit*"]
note("timm alone", timm.list_models(OURS))
import mctf.models
note("mctf.models", timm.list_models(OURS))

mctf.fuse(timm.create_model("test_vit"), r=4)
mctf.plan("test_vit", r=4)
note("fused")

from mctf.viz.demo import photographs
photographs()
note("photographs")
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    answer = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_import_and_help_load_nothing_heavy(facts: dict[str, Any]) -> None:
    assert facts["help"] is True
    assert facts["light"] == []


def test_importing_the_models_registers_them_with_timm(facts: dict[str, Any]) -> None:
    assert facts["timm alone"] == []
    assert facts["mctf.models"] == [
        "embedded",
        *("lvvit_m", "lvvit_s", "lvvit_t"),
        *("t2t_vit_t_14", "t2t_vit_t_19"),
    ]


def test_fusing_a_timm_model_loads_no_other_extra(facts: dict[str, Any]) -> None:
    assert {"torch", "timm"} <= set(facts["fused"])
    assert not {"transformers", "matplotlib", "tensorboard", "skimage"} & set(facts["fused"])


def test_photographs_are_located_without_importing_scikit_image(facts: dict[str, Any]) -> None:
    assert "skimage" not in facts["photographs"]
