"""The files around the code agree with it: versions, addresses, extras, workflows and the tests that SECURITY names."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import hf_paged

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
JOBS: dict[str, Any] = WORKFLOW["jobs"]
OF_THEIR_OWN = {"ray", "quantized", "eval", "test", "check", "docs", "notebooks"}
"""Extras beside `all`: other systems, and what works on the project."""
READ = [
    *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").iterdir(),
    *(ROOT / "examples").rglob("*.ipynb"), *(ROOT / "examples").glob("*.py"), *(ROOT / ".github").rglob("*.*"),
    ROOT / "mkdocs.yml", ROOT / "CITATION.cff",
]  # fmt: skip
"""Files that strangers read."""


def commands(job: str) -> list[str]:
    """The commands that a job runs."""
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def pythons(job: str) -> set[str]:
    """The Pythons that a job sets up."""
    matrix = JOBS[job].get("strategy", {}).get("matrix", {})
    given = {
        step["with"]["python-version"]
        for step in JOBS[job]["steps"]
        if "setup-python" in step.get("uses", "")
    }
    return {str(each) for each in matrix["python"]} if "python" in matrix else given


def test_every_part_has_its_job() -> None:
    """Lint, the suite, the site, the wheel and the notebooks; the suite as `.ci/run` has it."""
    ran = {job: commands(job)[0].split()[0] for job in JOBS}
    assert ran == {
        "lint": "scripts/check", "suite": "scripts/test", "docs": "scripts/docs", "wheel": "scripts/wheel",
        "notebooks": "scripts/notebooks",
    }  # fmt: skip
    assert "exec scripts/test\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("job", JOBS)
def test_jobs_call_scripts_that_exist(job: str) -> None:
    for command in commands(job):
        script = ROOT / command.split()[0]
        assert os.access(script, os.X_OK), f"{script} is not to be run"
        usage = script.read_text()
        for flag in re.findall(r"--\w+", command):
            assert flag in usage, f"{script.name} takes no {flag}"
    for step in JOBS[job]["steps"]:
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/checkout@v5"))


def test_pythons_are_those_of_the_classifiers() -> None:
    """The wheel is tried on each, the suite runs on the oldest and on the newest."""
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.M)
    assert pythons("wheel") == set(named)
    assert pythons("suite") == {named[0], named[-1]}
    assert PROJECT["requires-python"] == f">={named[0]}"
    assert all(pythons(job) <= set(named) for job in JOBS)


def test_the_suite_runs_on_two_releases_of_transformers() -> None:
    """On that of constraints.txt, and on another one that README names and the dependencies allow."""
    pinned, other = JOBS["suite"]["strategy"]["matrix"]["transformers"]
    assert pinned == ""
    assert f"transformers=={other}\n" not in (ROOT / "constraints.txt").read_text()
    assert other in (ROOT / "README.md").read_text()
    oldest = next(each for each in PROJECT["dependencies"] if each.startswith("transformers>=")).partition(
        ">="
    )[2]
    assert [int(part) for part in other.split(".")] >= [int(part) for part in oldest.split(".")]


def test_extras_that_are_named_exist() -> None:
    named = {
        name: file
        for file in [*READ, *ROOT.glob("scripts/*"), *(ROOT / "hf_paged").rglob("*.py")]
        if file.is_file()
        for found in re.findall(r"(?:hf_paged|'\.|\"\.)\[([a-z,]+)\]", file.read_text(errors="replace"))
        for name in found.split(",")
    }
    assert len(named) > 5
    assert named.keys() <= EXTRAS.keys(), {name: named[name] for name in named.keys() - EXTRAS.keys()}


def test_all_has_what_a_user_may_want() -> None:
    packages = {re.split(r"[>\[;]", each)[0].strip() for each in EXTRAS["all"]}
    included = {
        name
        for each in EXTRAS["all"]
        for name in re.findall(r"hf_paged\[(.*)\]", each)[:1]
        for name in name.split(",")
    }
    own = EXTRAS.keys() - OF_THEIR_OWN - included - {"all"}
    assert all({re.split(r"[>;]", each)[0] for each in EXTRAS[name]} <= packages for name in own), own
    assert EXTRAS.keys() >= OF_THEIR_OWN


def test_one_version_and_its_date() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    first, (version, date) = re.findall(r"^## \[(.*)\](?: - (.*))?$", changelog, re.M)[:2]
    assert first == ("Unreleased", "")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert version == hf_paged.__version__ == citation["version"]
    assert date == str(citation["date-released"])
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    assert citation["license"] == PROJECT["license"]


@pytest.mark.parametrize("file", READ, ids=lambda file: str(file.relative_to(ROOT)))
def test_addresses_are_those_of_the_project(file: Path) -> None:
    """Of one repository, and of no package index that has no hf_paged."""
    if not file.is_file() or file.suffix == ".png":
        return
    text = file.read_text()
    owner = PROJECT["urls"]["Repository"].removeprefix("https://github.com/")
    for found in re.findall(r"(?:github|raw\.githubusercontent)\.com/([\w-]+/[\w-]+)", text):
        assert found == owner
    assert not re.findall(r"pip install (?:-U )?['\"]?hf[_-]paged['\"\s\[](?!.*@ git)", text)


def test_the_tests_that_security_names_exist() -> None:
    named = re.findall(r"`tests/(\w+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 30
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not re.search(rf"^(?:async )?def {test}\(", (ROOT / "tests" / file).read_text(), re.M)
    ]
    assert not missing


@pytest.mark.parametrize(
    "file", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda file: file.stem
)
def test_issue_forms_are_forms(file: Path) -> None:
    form = yaml.safe_load(file.read_text())
    if file.stem == "config":
        assert form["contact_links"][0]["url"] == f"{PROJECT['urls']['Repository']}/security/advisories/new"
        return
    assert form.keys() == {"name", "description", "labels", "body"}
    ids = [part["id"] for part in form["body"]]
    assert len(set(ids)) == len(ids)
    assert all(part["type"] in ("input", "textarea") and part["attributes"]["label"] for part in form["body"])
    assert any(part.get("validations", {}).get("required") for part in form["body"])
