"""The table of releases: what it counts, what it shows, and what a release needs beside it."""

from __future__ import annotations

import json
import runpy
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "compatibility.py"))
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="one"/><testcase classname="tests.test_a" name="two"><failure/></testcase>
<testcase classname="tests.test_b" name="three"><skipped/></testcase><testcase classname="" name="tests.test_c"><error/></testcase>
<testcase classname="tests.test_docs" name="four"><failure/></testcase>
</testsuite></testsuites>"""


def row(transformers: str, **found: Any) -> dict[str, Any]:
    versions = {
        "transformers": transformers,
        "torch": "2.13.0+cpu",
        "python": "3.11.7",
        "date": "2026-11-27",
        "machine": "x86_64",
    }
    return {**versions, "tests": "fast", "passed": 2000, "failed": 0, "skipped": 3, "names": [], **found}


def test_a_report_is_counted_without_tests_of_texts(tmp_path: Path) -> None:
    reports = [tmp_path / "report.xml", tmp_path / "other.xml"]
    reports[0].write_text(REPORT)
    reports[1].write_text('<testsuites><testcase classname="tests.test_d" name="five"/></testsuites>')
    found = SCRIPT["counted"](reports)
    assert (found["passed"], found["failed"], found["skipped"]) == (2, 2, 1)
    assert found["names"] == ["tests/test_a.py::two", "tests/test_c.py::tests.test_c"]


def test_a_run_of_a_part_says_so(tmp_path: Path) -> None:
    report, files = tmp_path / "report.xml", list((ROOT / "tests").glob("test_*.py"))
    report.write_text(REPORT)
    assert SCRIPT["covered"]([report]) == f"3 of {len(files) - 2} files"
    cases = [f'<testcase classname="tests.{file.stem}" name="one"/>' for file in files]
    report.write_text(f"<testsuites>{''.join(cases)}</testsuites>")
    assert SCRIPT["covered"]([report]) == "whole"
    report.write_text(report.read_text().replace('tests.test_kv_batch"', 'tests.test_kv_batch.TestWalk"'))
    assert SCRIPT["covered"]([report]) == "whole"


def test_the_page_has_a_row_for_each_run_and_keeps_its_words() -> None:
    whole = row("5.24.0", tests="whole", passed=9000)
    results = {
        "whole": whole,
        "new": row("5.24.0"),
        "old": row("5.9.0", failed=1, names=["tests/test_a.py::two"]),
    }
    lines = SCRIPT["page"](results).splitlines()
    assert [line for line in lines if line.startswith("| 5.")] == [
        "| 5.9.0 | 2.13.0+cpu | 3.11.7 | fast | 2,000 | 1 | 3 | 2026-11-27 |",
        "| 5.24.0 | 2.13.0+cpu | 3.11.7 | fast | 2,000 | 0 | 3 | 2026-11-27 |",
        "| 5.24.0 | 2.13.0+cpu | 3.11.7 | whole | 9,000 | 0 | 3 | 2026-11-27 |",
    ]
    assert "- `tests/test_a.py::two`" in lines
    assert "## Limits of single releases" in lines


def test_the_page_is_that_of_the_results() -> None:
    """Of scripts/compatibility.json; the words behind the tables are written by hand."""
    results = json.loads(SCRIPT["RESULTS"].read_text())
    assert SCRIPT["page"](results) == (ROOT / "docs" / "compatibility.md").read_text()
    for found in results.values():
        assert bool(found["failed"]) == bool(found["names"] or found.get("notes"))


def test_requirements_that_this_environment_does_not_meet() -> None:
    """Those of a release in a folder of its own come from there first."""
    is_met, there = SCRIPT["is_met"], {"packaging": distribution("pytest")}
    assert is_met(Requirement("torch>=2.0"), {})
    assert not is_met(Requirement("torch<2.0"), {})
    assert not is_met(Requirement("no-such-package"), {})
    assert is_met(Requirement(f"packaging=={distribution('pytest').version}"), there)
