"""How the C++ op is built and kept: once, whole, on request, and with a reason where it cannot be."""

from __future__ import annotations

import logging
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_paged_native as native
from hf_paged.kv import Layout
from hf_paged.kv import ops as ops_module
from hf_paged.kv.ops import Ops, choose
from hf_paged_native import building

LAYOUT = Layout(torch.device("cpu"), torch.float32, 2, 8, 8)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for libraries, and a log that has told nothing yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("CXX", raising=False)
    ops_module._tell.cache_clear()
    return tmp_path / "extensions" / "hf_paged_native"


def script(path: Path, text: str) -> str:
    """A program that stands for a compiler: the file to make is its last argument."""
    path.write_text(f"#!/bin/sh\nfor out; do :; done\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *arguments, **options: None)


# ---- where it cannot be


def test_without_a_compiler(no_compiler: None, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Asking for it is an error that says why; "auto" is plain torch and does not even mention it."""
    with pytest.raises(
        ValueError, match=r"kernels='native' cannot run here: there is no C\+\+ compiler .* install g\+\+"
    ):
        choose("native", LAYOUT, captured=False)
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        assert type(choose("auto", LAYOUT, captured=False)) is Ops
    assert not caplog.records
    assert not folder.exists()


def test_auto_builds_nothing_and_says_so_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody who did not ask waits for a compiler; the log says how to ask."""
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(
        subprocess, "run", lambda *arguments, **options: pytest.fail("a compiler was started")
    )
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        for _ in range(3):
            assert type(choose("auto", LAYOUT, captured=False)) is Ops
    (message,) = (record.getMessage() for record in caplog.records)
    assert "`python -m hf_paged_native` builds" in message
    assert not folder.exists()


TROUBLE = {
    "fails": (
        "echo paged.cpp:1: no such thing >&2; exit 3",
        "failed with 3 and said: paged.cpp:1: no such thing",
    ),
    "says nothing": ("exit 1", "failed with 1 and said: nothing"),
    "makes no library": ("echo hello > $out", "cannot be used"),
    "makes nothing": ("rm -f $out", "cannot be used"),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_a_compiler_in_trouble(
    name: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is told, nothing is left that could be taken for a library, and the next try begins anew."""
    text, why = TROUBLE[name]
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", text))
    for _ in range(2):
        with pytest.raises(native.Unavailable, match=why):
            native.build()
        assert native.find() is None
        assert not list(folder.iterdir())


@pytest.mark.parametrize(("name", "links"), [("gcc", True), ("g++", False)])
def test_a_driver_of_c_is_told_to_link_the_library_of_cpp(
    name: str, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft's BOFT leaves CXX=gcc behind where it cannot build its own kernel."""
    monkeypatch.setenv("CXX", script(tmp_path / name, f'echo "$@" > {tmp_path}/asked; exit 1'))
    with pytest.raises(native.Unavailable):
        native.build()
    assert ("-lstdc++" in (tmp_path / "asked").read_text().split()) is links


def test_a_compiler_that_is_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++ -v")
    with pytest.raises(native.Unavailable, match="CXX='/nowhere/c\\+\\+ -v' is not a program"):
        native.build()


def test_a_compiler_that_never_ends(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "SECONDS", 0.2)
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", "exec sleep 20"))
    with pytest.raises(native.Unavailable, match=r"was not done after 0\.2 seconds"):
        native.build()
    assert not list(folder.iterdir())


def test_nowhere_to_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be made, and no home at all."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(native.Unavailable, match=r"cannot be kept in .*set TORCH_EXTENSIONS_DIR"):
        native.build()
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert native.find() is None
    with pytest.raises(native.Unavailable, match="no home folder"):
        native.build()


def test_a_library_that_does_not_load(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file in its place that is no library: an error where it was asked for, plain torch elsewhere."""
    folder.mkdir(parents=True)
    building.place().write_text("not a library")
    with pytest.raises(ValueError, match=r"cannot be loaded .* delete it"):
        choose("native", LAYOUT, captured=False)
    with caplog.at_level(logging.INFO, logger="hf_paged"):
        assert type(choose("auto", LAYOUT, captured=False)) is Ops
    assert "cannot be loaded" in caplog.text


# ---- where it is kept


def test_another_source_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds for other registers or from another source are never taken."""
    known = {building.place(registers) for registers in ("DEFAULT", "AVX2", "AVX512")}
    assert len(known) == 3
    changed = tmp_path / "paged.cpp"
    changed.write_text(building.SOURCES[0].read_text() + "\n")
    monkeypatch.setattr(building, "SOURCES", (changed, *building.SOURCES[1:]))
    assert building.place() not in known


def test_kept_beside_the_extensions_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert building.folder() == tmp_path / "torch_extensions" / "hf_paged_native"


compiles = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library, built by the command; without optimisation, which takes most of the time and is tried where the
    functions are tested.
    """
    place = tmp_path_factory.mktemp("ready")
    compiler = place / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {shlex.join(native.compiler() or [])} "$@" -O0\n')
    compiler.chmod(0o755)
    kernels = str(building.FOLDER.parent)
    environment = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(place),
        "PYTHONPATH": kernels,
        "CXX": str(compiler),
    }
    done = subprocess.run(
        [sys.executable, "-m", "hf_paged_native"], env=environment, capture_output=True, text=True, check=True
    )
    (file,) = (place / "hf_paged_native").iterdir()
    assert done.stdout.strip() == f"built for {building.capability()}: {file}"
    assert "once" in done.stderr
    return file


@compiles
def test_the_command_says_why_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(SystemExit, match="1"):
        runpy.run_module("hf_paged_native", run_name="__main__")
    assert "cannot be had: there is no C++ compiler" in capsys.readouterr().err


@compiles
def test_built_once(ready: Path, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time nobody asks for a compiler, and "auto" finds what is there."""
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", f"echo >> {tmp_path / 'runs'}; cp {ready} $out"))
    for _ in range(3):
        assert native.build() == building.place()
    assert len((tmp_path / "runs").read_text().splitlines()) == 1
    assert type(choose("auto", LAYOUT, captured=False)) is ops_module.NativeOps
    assert [file.name for file in folder.iterdir()] == [building.place().name]


@compiles
def test_built_by_several_at_once(
    ready: Path, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each compiles for itself; what is put in place is whole at every moment."""
    compiler = script(
        tmp_path / "compiler",
        f"echo >> {tmp_path / 'runs'}; head -c 999 {ready} > $out; sleep 0.2; cp {ready} $out",
    )
    monkeypatch.setenv("CXX", compiler)
    answers: list[Any] = []

    def build() -> None:
        answers.append(native.load(native.build()))

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    assert [file.name for file in folder.iterdir()] == [building.place().name]
    assert len((tmp_path / "runs").read_text().splitlines()) > 1
