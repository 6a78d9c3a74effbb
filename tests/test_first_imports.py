"""Imports of a fresh process: nothing of extras that nobody asked for, and no torch for the help of a
command.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from fresh_process import FreshProcess

ROOT = Path(__file__).parent.parent
COMMAND_LINES = (
    "--version",
    "--help",
    "",
    "serve --help",
    "generate --help",
    "completion bash",
    "completion zsh",
)
MOST_SECONDS = 1.0
"""Of the processor for a command line that only prints; it takes 0.05 to 0.08, and the import of torch some 5."""
STAGES = ["hf_paged", "hf_paged.serve.app, hf_paged.serve.server, hf_paged.serve.http_process"]


@pytest.fixture(scope="module")
def imported(fresh_process: FreshProcess) -> list[list[str]]:
    """The names of all modules after each of the stages, in a process that has imported the package alone."""
    stages = STAGES if find_spec("fastapi") else STAGES[:1]
    code = "import sys\n" + "".join(f"import {stage}\nprint(*sys.modules)\n" for stage in stages)
    ended = fresh_process.run(code)
    assert ended.code == 0, ended.stderr
    return [line.split() for line in ended.stdout.splitlines()]


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


@pytest.mark.parametrize("arguments", COMMAND_LINES)
def test_the_command_line_starts_without_torch(arguments: str) -> None:
    """By the entry point that pip installs."""
    module, _, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][
        "hf-paged"
    ].partition(":")
    code = (
        f"import sys, time\nfrom {module} import {name}\n"
        f"try:\n    code = {name}({arguments.split()})\n"
        "except SystemExit as ended:\n    code = ended.code\n"
        "print(time.process_time(), *sys.modules, file=sys.stderr)\nsys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, *modules = ran.stderr.split()
    assert ran.stdout
    assert not {"torch", "transformers", "numpy", "hf_paged"}.intersection(modules)
    assert float(seconds) < MOST_SECONDS
