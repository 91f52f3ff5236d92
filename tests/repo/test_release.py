"""What a release consists of: one version, a citation, a changelog, and the program that tests the wheel."""

import re
import runpy
import sys
import tomllib
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
    assert [author["name"] for author in PROJECT["project"]["authors"]] == [each["name"] for each in citation["authors"]]


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
