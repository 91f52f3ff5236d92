"""What a release consists of: one version, a citation, a changelog, and the program that tests the wheel."""

import re
import runpy
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import mctf

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHECK = runpy.run_path(str(ROOT / "tests/repo/release_check.py"))


def test_the_version_has_one_source() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mctf.__version__"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == mctf.__version__
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == PROJECT["project"]["license"]
    paper = citation["preferred-citation"]
    assert paper["type"] == "conference-paper"
    assert f"title     = {{{paper['title']}}}" in (ROOT / "README.md").read_text()
    assert [author["name"] for author in PROJECT["project"]["authors"]] == [
        each["name"] for each in citation["authors"]
    ]


def test_classifiers_name_the_supported_versions() -> None:
    classifiers = PROJECT["project"]["classifiers"]
    versions = [each.rpartition(" ")[2] for each in classifiers if re.search(r":: 3\.\d+$", each)]
    assert versions == list(CHECK["SUPPORTED"])
    assert set(PROJECT["project"]["keywords"]) == set(yaml.safe_load((ROOT / "CITATION.cff").read_text())["keywords"])


def test_the_changelog_has_sections_that_people_look_for() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[[\d.]+\] - \d{4}-\d\d-\d\d", version) for version in versions[1:])
    sections = re.findall(r"^### (.*)$", text, flags=re.MULTILINE)
    assert set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_templates_are_valid() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert path.name == "config.yml" or {"name", "description", "body"} <= set(form)


def test_the_lowest_versions_are_below_the_pins() -> None:
    lowest = dict(line.split("==") for line in CHECK["lowest"](PROJECT["project"], CHECK["EXTRAS"]))
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().lower().replace("_", "-").split())
    assert {"torch", "timm", "numpy", "transformers", "onnx"} <= set(lowest)
    assert [name for name, version in lowest.items() if Version(version) > Version(pins[name])] == []


def test_a_dependency_without_a_lower_bound_is_refused() -> None:
    project = {"name": "p", "dependencies": ["torch>=2.9,<3", "numpy"], "optional-dependencies": {"x": ["torch>=2.8"]}}
    with pytest.raises(SystemExit, match="numpy has no lower bound"):
        CHECK["lowest"](project, [])
    project["dependencies"] = ["torch>=2.9"]
    assert CHECK["lowest"](project, []) == ["torch==2.9"]
    with pytest.raises(SystemExit, match="two lower bounds"):
        CHECK["lowest"](project, ["x"])


def test_every_extra_of_users_is_checked() -> None:
    """`all` has what a user installs; the package datasets, of which tests have a stand-in, is left out."""
    (everything,) = PROJECT["project"]["optional-dependencies"]["all"]
    extras = re.findall(r"[a-z]+", everything.partition("[")[2])
    assert set(CHECK["EXTRAS"]) == set(extras) - {"datasets"}


@pytest.mark.parametrize(
    ("failed", "missing", "code"),
    [([], [], None), (["3.12"], [], 1), ([], ["3.11", "lowest"], 2), (["3.12"], ["3.13"], 1)],
)
def test_what_was_not_checked_is_said_and_is_no_success(failed, missing, code, capsys) -> None:
    if code is None:
        CHECK["report"](CHECK["CHECKS"], failed=failed, missing=missing)
        assert capsys.readouterr().out == "passed: 3.11, 3.12, 3.13, lowest\n"
        return
    with pytest.raises(SystemExit) as stop:
        CHECK["report"](CHECK["CHECKS"], failed=failed, missing=missing)
    assert stop.value.code == code
    said = capsys.readouterr().out
    assert ("not checked" in said) == bool(missing)
    if "lowest" in missing:
        assert "lowest (Python 3.11)" in said
        assert "--skip 3.11,lowest" in said


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--skip", "3.11,3.13,lowest"], 0)])
def test_missing_interpreters_and_skipped_checks(arguments, code, capsys, monkeypatch, tmp_path) -> None:
    checked: list[str] = []
    inside = CHECK["main"].__globals__
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/mctf-0-py3-none-any.whl").touch()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setitem(inside, "ROOT", tmp_path)
    found = {"3.11": None, "3.12": Path(sys.executable), "3.13": None}
    monkeypatch.setitem(inside, "find_interpreters", lambda: found)
    monkeypatch.setitem(inside, "install_and_test", lambda name, *_: checked.append(name))
    monkeypatch.setattr(sys, "argv", ["release_check.py", "--folder", str(tmp_path / "kept"), *arguments])
    with pytest.raises(SystemExit) if code else nullcontext() as stop:
        CHECK["main"]()
    assert code == 0 or stop.value.code == code
    assert checked == ["3.12"]
    assert ("lowest (Python 3.11)" in capsys.readouterr().out) == (code == 2)


def test_a_failed_check_is_a_failure(monkeypatch) -> None:
    with pytest.raises(CHECK["CheckFailedError"], match="failed with exit code 3"):
        CHECK["run"](sys.executable, "-c", "raise SystemExit(3)", cwd=ROOT)


def test_interpreters_are_found_by_running_them() -> None:
    found = CHECK["find_interpreters"]()
    assert list(found) == ["3.11", "3.12", "3.13"]
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert found.get(own, Path(sys.executable)) == Path(sys.executable)
    assert CHECK["version_of"](Path("/bin/false")) is None


def test_a_schedule_runs_the_nightly_tests() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    assert workflow[True]["schedule"], "YAML reads `on` as true"
    assert "make nightly" in [step.get("run") for step in workflow["jobs"]["nightly"]["steps"]]


def test_supported_versions_are_those_of_the_workflow() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.findall(r'"(3\.\d+)"', workflow) == list(CHECK["SUPPORTED"])
