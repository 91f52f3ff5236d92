"""Code shown in the README and the guide: it runs, the guide tells of it truly, and mctf takes hosts from outside."""

import re
import runpy
from typing import Any

import pytest
import torch
from torch import nn

import mctf
import mctf.hosts
from helpers.families.own import EXAMPLES
from helpers.flops import EXACT, counted
from helpers.models import REFERENCED, make, make_images, run
from helpers.reference_check import assert_as_reference
from helpers.refusals import assert_refused

README = EXAMPLES.parent / "README.md"
GUIDE = EXAMPLES.parent / "docs" / "adding_a_host.md"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    make("own_vit")  # registers its host once and for all
    monkeypatch.setattr(mctf.hosts, "_REGISTERED", dict(mctf.hosts._REGISTERED))


def test_the_readme_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    random_weights = code.replace("pretrained=True", "pretrained=False")  # nothing can be downloaded here
    assert random_weights != code
    assert len([line for line in code.splitlines() if line]) == 4
    exec(random_weights, {})
    (kept, whole) = re.search(r"([\d.]+) GFLOPs of ([\d.]+) ", capsys.readouterr().out).groups()
    (promised,) = re.findall(r"# keep (\d+) % of the FLOPs", code)
    assert float(kept) / float(whole) == pytest.approx(int(promised) / 100, abs=0.01)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_host.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert "[65, 57, 49, 41]" in text
    assert text.count("True") == 2
    assert "False" not in text


@pytest.mark.parametrize("method", REFERENCED)
@torch.no_grad()
def test_its_host_is_right(method: str) -> None:
    """The three things the guide asks of every host."""
    model = make("own_vit").double()
    images = make_images(model, 2)
    plain = model(images)
    assert torch.equal(mctf.fuse(model, method, r=0)(images), plain)
    assert torch.equal(mctf.unfuse(model)(images), plain)
    assert_as_reference(model, images, [0, 8, 8, 8], method)
    assert counted(model, images) == pytest.approx(mctf.plan(model, method=method, r=0).gflops_run, rel=EXACT)
    mctf.fuse(model, method, r=8)
    assert counted(model, images) == pytest.approx(mctf.plan(model, method=method, r=8).gflops_run, rel=EXACT)


def test_its_host_refuses_what_it_would_get_wrong() -> None:
    model = make("own_vit")
    with pytest.raises(mctf.MctfError, match="takes images of 64 pixels only"):
        mctf.plan(model, image_size=96)
    handle = model.layers[1].attention.register_forward_hook(lambda *_: None)
    assert_refused(model, "layers.1.attention has hooks", lambda: mctf.fuse(model))
    handle.remove()
    model.layers[2] = nn.Identity()
    assert_refused(model, "layers.2 is a Identity", lambda: mctf.fuse(model))


def test_the_guide_quotes_the_example() -> None:
    code = (EXAMPLES / "own_host.py").read_text()
    quotes = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert len(quotes) >= 5
    assert [quote for quote in quotes if quote not in code] == []


def test_the_example_imports_public_names_alone() -> None:
    code = (EXAMPLES / "own_host.py").read_text()
    assert set(re.findall(r"mctf(?:\.\w+)*(?= import|\n)", code)) == {"mctf", "mctf.hosts"}
    (names,) = re.findall(r"from mctf.hosts import \((.*?)\)", code, flags=re.DOTALL)
    assert set(re.findall(r"\w+", names)) <= set(mctf.hosts.__all__)
    assert all(hasattr(mctf.hosts, name) for name in mctf.hosts.__all__)


def test_a_subclass_has_the_host_of_its_nearest_ancestor() -> None:
    model = make("own_vit")
    kind, host = type(model), type(mctf.hosts.find_host(model))

    class Nearer(kind):
        pass

    class OtherHost(host):
        pass

    assert type(mctf.hosts.find_host(Nearer())) is host
    mctf.register_host(Nearer, OtherHost)
    assert type(mctf.hosts.find_host(Nearer())) is OtherHost
    assert type(mctf.hosts.find_host(model)) is host


def test_a_registered_host_comes_before_mctf_s_own() -> None:
    model = make("plain")
    theirs = type(mctf.hosts.find_host(model))
    seen: list[nn.Module] = []

    def host(each: nn.Module) -> Any:
        seen.append(each)
        return theirs(each)

    mctf.register_host(type(model), host)
    mctf.plan(model)
    assert seen == [model]


def test_the_one_inside_is_named() -> None:
    outer = nn.Sequential(make("own_vit"))
    with pytest.raises(mctf.MctfError, match=r"mctf.fuse\(model.get_submodule\('0'\)\)"):
        mctf.fuse(outer)
    mctf.fuse(outer[0], r=8)
    assert run(outer[0], torch.randn(1, 3, 64, 64)).shape == (1, 10)


def test_an_unknown_model_is_told_of_registration() -> None:
    with pytest.raises(mctf.MctfError, match=r"or register a host for it by mctf.register_host"):
        mctf.fuse(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("model_class", "host", "text"),
    [
        (nn.Linear(2, 2), len, "expected a class of models, a subclass of torch.nn.Module, got Linear"),
        (int, len, "expected a class of models"),
        (nn.Linear, "host", "expected a function or class that takes a model and returns its host, got 'host'"),
    ],
)
def test_what_cannot_be_registered(model_class: Any, host: Any, text: str) -> None:
    with pytest.raises(mctf.MctfError) as caught:
        mctf.register_host(model_class, host)
    assert text in str(caught.value)


def test_a_host_that_lacks_something_cannot_be_made() -> None:
    class Half(mctf.hosts.Host):
        protected = 1

    with pytest.raises(TypeError, match=r"abstract methods.*architecture.*container.*ops"):
        Half()
