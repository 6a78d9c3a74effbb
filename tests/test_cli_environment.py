"""The report of an installation on itself."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from fresh_process import FreshProcess

import hf_paged
from hf_paged.cli.environment import facts


def test_facts_are_those_of_this_process() -> None:
    found = facts()
    assert found.versions["hf_paged"] == hf_paged.__version__
    assert found.versions["python"] == platform.python_version()
    for name in ("torch", "transformers", "accelerate", "peft"):
        assert found.versions[name] == version(name)
    if not torch.cuda.is_available():
        assert [device.split(",")[0] for device in found.devices] == ["cpu"]
        assert "there is none" in found.kernels["triton"]
    else:
        assert len(found.devices) == torch.cuda.device_count()
        assert torch.cuda.get_device_name(0) in found.devices[0]
    assert found.kernels["torch"] == "available"


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error: peft and triton are optional."""
    monkeypatch.setattr("hf_paged.cli.environment.importlib.util.find_spec", lambda name: None)
    found = facts()
    assert found.versions["peft"] is None
    assert any(line.split() == ["peft", "not", "installed"] for line in found.lines())


def test_the_cpp_op_is_looked_for_and_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert "not built" in facts().kernels["native"]
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    assert facts().kernels["native"] == "not built, and there is no C++ compiler"
    assert not list(tmp_path.iterdir())


def test_a_cpp_op_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in its place that is no library is said to be none."""
    from hf_paged_native import building

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    building.place().parent.mkdir(parents=True)
    building.place().write_bytes(b"no library")
    state = facts().kernels["native"]
    assert state != "available"
    assert "not built" not in state


def test_python_m_hf_paged(tmp_path: Path, fresh_process: FreshProcess) -> None:
    """A line for each fact, and for a model's; a fresh process needs nothing but the package, and no web framework."""
    script = (
        "import os, runpy, sys\n"
        f"os.environ['TORCH_EXTENSIONS_DIR'] = {str(tmp_path)!r}\n"
        "for name in ('fastapi', 'starlette', 'uvicorn', 'pydantic'): sys.modules[name] = None\n"
        "runpy.run_module('hf_paged', run_name='__main__')"
    )
    ended = fresh_process.run(script, "info", "demo")
    assert ended.code == 0, ended.stderr
    said = {line.split()[0]: line.split(maxsplit=1)[1] for line in ended.stdout.splitlines() if line}
    assert said["hf_paged"] == hf_paged.__version__
    assert said["torch"] == version("torch")
    assert said["transformers"] == version("transformers")
    assert said["python"] == platform.python_version()
    assert said["device"]
    assert said["kernels='torch'"] == "available"
    assert "not built" in said["kernels='native'"]
    assert "llama" in said["model"].lower()
