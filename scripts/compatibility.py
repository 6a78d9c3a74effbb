"""Run the suite, or its fast subset, on other releases of transformers, torch and Python, and note what passed.

    .venv/bin/python scripts/compatibility.py                                 # all cells of PATH
    .venv/bin/python scripts/compatibility.py transformers==5.9.0 python3.13  # these
    .venv/bin/python scripts/compatibility.py --whole transformers==5.24.0    # the whole suite
    .venv/bin/python scripts/compatibility.py --write docs/compatibility.md   # the page, of all that has run

A cell differs from constraints.txt in one thing. A release of a package lies in a folder of its own, with what
it requires in other versions, before the packages of this environment; a Python has an environment of its own.
Both are made below .compatibility. Results are in scripts/compatibility.json, each with its failed tests, or with `notes`
on them that were written by hand; a new run of a cell begins without. `--reports` takes the numbers of a run in parts
from its JUnit files, and runs nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as xml
from importlib.metadata import Distribution, distributions, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".compatibility"
RESULTS = ROOT / "scripts" / "compatibility.json"
PATH = (
    *(f"transformers=={release}" for release in ("5.9.0", "5.14.1", "5.17.0", "5.23.0", "5.24.0")),
    *(f"torch=={release}" for release in ("2.11.0", "2.12.1", "2.14.1", "2.15.0")),
    "python3.13",
)
OF_THE_TEXT = ("tests.test_house", "tests.test_docs")
"""Tests of the repository's text, which no release changes."""
WORDS = {"fast": ["--fast"], "whole": ["-n", "2", "--dist", "worksteal"]}
"""The arguments of scripts/test for the tests of a run."""
COLUMNS = ("transformers", "torch", "python", "tests", "passed", "failed", "skipped", "date")
VERSIONS = """
import platform, torch, transformers
print(transformers.__version__, torch.__version__, platform.python_version())
"""
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def main() -> None:
    """Run cells, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", help=f"of {' '.join(PATH)}, or any other release")
    parser.add_argument("--whole", action="store_true", help="the whole suite, not its fast subset")
    parser.add_argument("--reports", nargs="+", type=Path, metavar="XML", help="of a run of the one cell")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page, and run nothing")
    given = parser.parse_args()
    PLACE.mkdir(exist_ok=True)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if given.write:
        given.write.write_text(page(results))
        return
    if given.reports and len(given.cells) != 1:
        parser.error(f"--reports are of one cell, got {given.cells or 'none'}")
    tests = "whole" if given.whole else "fast"
    for cell in given.cells or PATH:
        row = results[f"{cell} {tests}"] = run(cell, tests, given.reports)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(cell, tests, {name: row[name] for name in ("passed", "failed", "skipped")})


def run(cell: str, tests: str, reports: list[Path] | None = None) -> dict[str, Any]:
    """Versions and numbers of a cell, and the tests that failed there. reports: of a run that was made before."""
    folder = PLACE / cell.replace("==", "-")
    of_python = cell.startswith("python")
    environment = folder if of_python else Path(sys.prefix)
    path = [*([] if of_python else [str(folder)]), str(ROOT), str(ROOT / "kernels")]
    variables = {**os.environ, "PYTHONPATH": ":".join(path), "HF_PAGED_ENVIRONMENT": str(environment)}
    if reports is None:
        (make_environment if of_python else lay_over)(cell, folder)
        reports = [PLACE / f"{folder.name}.{tests}.xml"]
        reports[0].unlink(missing_ok=True)
        words = [*WORDS[tests], f"--junitxml={reports[0]}", "-p", "no:cacheprovider"]
        subprocess.run(["scripts/test", *words], cwd=ROOT, env=variables)
    python = str(environment / "bin" / "python")
    asked = subprocess.run(
        [python, "-c", VERSIONS], env=variables, check=True, capture_output=True, text=True
    )
    versions = dict(zip(COLUMNS, asked.stdout.split()[-3:], strict=False))
    extent = covered(reports) if tests == "whole" else tests
    conditions = {"date": datetime.date.today().isoformat(), "machine": platform.machine()}
    return {**conditions, **versions, "tests": extent, **counted(reports)}


def make_environment(python: str, folder: Path) -> None:
    """An environment of another Python."""
    if not folder.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    what = ["--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[test]"]
    subprocess.run([str(folder / "bin" / "python"), *PIP, *what], check=True)


def lay_over(cell: str, folder: Path) -> None:
    """A release of a package in a folder, and what it requires in other versions than this environment has."""
    waiting = [] if version(Requirement(cell).name) == cell.partition("==")[2] else [cell]
    seen: set[str] = set()
    while waiting:
        subprocess.run(
            [sys.executable, *PIP, "--no-deps", "--upgrade", "--target", str(folder), *waiting], check=True
        )
        seen |= {Requirement(each).name for each in waiting}
        there = {each.name.lower(): each for each in distributions(path=[str(folder)])}
        waiting = [
            str(need) for each in there.values() for need in requirements(each)
            if need.name not in seen and not is_met(need, there)
        ]  # fmt: skip


def requirements(package: Distribution) -> list[Requirement]:
    """Those that hold here, without extras."""
    found = [Requirement(each) for each in package.requires or ()]
    return [need for need in found if need.marker is None or need.marker.evaluate({"extra": ""})]


def is_met(need: Requirement, there: dict[str, Distribution]) -> bool:
    """True if a requirement has a fitting version, in the folder or in this environment."""
    own = there.get(need.name.lower())
    try:
        return (version(need.name) if own is None else own.version) in need.specifier
    except ModuleNotFoundError:
        return False


def counted(reports: list[Path]) -> dict[str, Any]:
    """The numbers of a run, and the tests that failed."""
    cases = [case for report in reports for case in xml.parse(report).iter("testcase")]
    found = [case for case in cases if not module_of(case).startswith(OF_THE_TEXT)]
    failed = [case for case in found if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in found)
    names = sorted({f"{module_of(case).replace('.', '/')}.py::{case.get('name')}" for case in failed})
    counts = {"passed": len(found) - len(failed) - skipped, "failed": len(names), "skipped": skipped}
    return {**counts, "names": names}


def covered(reports: list[Path]) -> str:
    """How much of the suite a run has had."""
    names = {module_of(case) for report in reports for case in xml.parse(report).iter("testcase")}
    modules = {".".join(name.split(".")[:2]) for name in names}  # without a class
    ran = {module for module in modules if not module.startswith(OF_THE_TEXT)}
    there = {f"tests.{file.stem}" for file in ROOT.glob("tests/test_*.py")} - set(OF_THE_TEXT)
    return "whole" if ran >= there else f"{len(ran):,} of {len(there):,} files"


def module_of(case: xml.Element) -> str:
    """The module of a test; one that could not be imported has no other name."""
    return case.get("classname") or case.get("name") or ""


def page(results: dict[str, Any]) -> str:
    """The table of all cells that have run, and the tests that failed."""
    written = ROOT / "docs" / "compatibility.md"
    words = written.read_text().partition("<!-- words -->")[2] if written.exists() else "\n"
    rows = sorted(
        results.values(), key=lambda row: ([numbers(row[name]) for name in COLUMNS[:3]], row["tests"])
    )
    machines = ", ".join(sorted({row["machine"] for row in rows}))
    lines = [
        "# Compatibility",
        "",
        f"Made by `scripts/compatibility.py` on CPUs ({machines}): the fast subset of the suite (`scripts/test --fast`) or",
        "the whole suite, without its tests of texts, and with the packages of constraints.txt but for the versions named here. A",
        "row is a run; where it had a part of the suite, the row says how many files of tests. Combinations that are not listed were",
        "not run. CI runs the whole suite on the release of constraints.txt and on 5.24.0.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for row in rows:
        values = [row[name] for name in COLUMNS]
        lines.append(f"| {' | '.join(f'{each:,}' if isinstance(each, int) else each for each in values)} |")
    for row in rows:
        notes = row.get("notes") or [f"`{name}`" for name in row["names"]]
        if notes:
            lines += [
                "",
                f"Failed on transformers {row['transformers']}, torch {row['torch']}, Python {row['python']} ({row['tests']}):",
                "",
            ]
            lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n\n<!-- words -->" + words


def numbers(release: str) -> list[int]:
    """A release as numbers, for sorting."""
    return [int(each) for each in release.partition("+")[0].split(".") if each.isdigit()]


if __name__ == "__main__":
    main()
