"""What a fresh process imports with this package: nothing of extras that nobody asked for."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

STAGES = ["hf_paged", "hf_paged.serve.app, hf_paged.serve.server, hf_paged.serve.http_process"]


@pytest.fixture(scope="module")
def imported() -> list[list[str]]:
    """The names of all modules after each of the stages, in one process."""
    stages = STAGES if find_spec("fastapi") else STAGES[:1]
    code = "import sys\n" + "".join(f"import {stage}\nprint(*sys.modules)\n" for stage in stages)
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return [line.split() for line in ran.stdout.splitlines()]


def test_the_package_imports_nothing_of_ray(imported: list[list[str]]) -> None:
    assert "hf_paged" in imported[0]
    assert not [name for name in imported[0] if name.split(".")[:2] in (["ray"], ["hf_paged", "ray"])]


def test_the_server_imports_no_exporter_of_spans(imported: list[list[str]]) -> None:
    """It needs the flag."""
    pytest.importorskip("fastapi")
    assert "hf_paged.serve.app" in imported[1]
    assert not [
        name for name in imported[1] if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))
    ]
