"""How the C++ source becomes a library, and where that is kept."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger("hf_paged")

FOLDER = Path(__file__).parent
SOURCES = (FOLDER / "paged.cpp", FOLDER / "invariant.cpp")
HEADER = FOLDER / "registers.h"
COMPILERS = ("c++", "g++", "clang++")
C_DRIVERS = ("cc", "gcc", "clang")
"""Names of compilers that link no C++ library by themselves. Some libraries set $CXX to one of them."""
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared"]
REGISTERS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"],
    "AVX2": ["-mavx2", "-mfma"],
}
"""Flags by what torch found out about the machine; anything else is built for the least that its kind of
machine has.
"""
SECONDS = 300
"""How long a compiler may take."""


class Unavailable(RuntimeError):
    """The library is unavailable; the message gives the reason."""


def capability() -> str:
    """The vector registers of this machine, in torch's words: libraries are kept by it, so none runs where it
    cannot.
    """
    return torch.backends.cpu.get_cpu_capability()


def folder() -> Path:
    """Where libraries are kept: next to the extensions that torch itself builds."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen) / "hf_paged_native"
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise Unavailable(
            f"there is no home folder to keep the library in ({error}); set TORCH_EXTENSIONS_DIR"
        ) from error
    return cache / "torch_extensions" / "hf_paged_native"


def place(registers: str | None = None) -> Path:
    """The file that holds the library for these sources, this kind of machine and these registers."""
    registers = registers or capability()
    texts = [file.read_text() for file in (*SOURCES, HEADER)]
    facts = [*texts, *FLAGS, *REGISTERS.get(registers, [])]
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
    return folder() / f"{platform.system()}-{platform.machine()}-{registers}-{digest}.so".lower()


def find(registers: str | None = None) -> Path | None:
    """The library's file if it exists. Nothing is built, no compiler is searched for."""
    try:
        file = place(registers)
        return file if file.exists() else None
    except (Unavailable, OSError):
        return None


def compiler() -> list[str] | None:
    """The C++ compiler as a command: $CXX, or the first that is found."""
    chosen = os.environ.get("CXX")
    if chosen:
        command = shlex.split(chosen)
        return command if command and shutil.which(command[0]) else None
    return next(([name] for name in COMPILERS if shutil.which(name)), None)


def build(registers: str | None = None) -> Path:
    """Compile the library unless it exists, and return its file.

    Two processes may do it at once: each compiles into a file of its own and moves it into place whole.
    Neither waits, and a process that is killed leaves no file that would be taken for a library.
    """
    target = place(registers)
    if target.exists():
        return target
    command = compiler()
    if command is None:
        wanted = os.environ.get("CXX")
        looked = (
            f"CXX={wanted!r} is not a program of this machine"
            if wanted
            else f"none of {', '.join(COMPILERS)} is on the PATH"
        )
        raise Unavailable(f"there is no C++ compiler ({looked}); install g++ or clang++, or set CXX")
    logger.warning(
        "building the C++ ops for CPUs with %s, once; it takes some seconds and is kept in %s",
        command[0],
        target.parent,
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, own = tempfile.mkstemp(suffix=".so", prefix="building-", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise Unavailable(
            f"the library cannot be kept in {target.parent} ({error.strerror}); set TORCH_EXTENSIONS_DIR"
        ) from error
    try:
        flags = [*FLAGS, *REGISTERS.get(registers or capability(), [])]
        library = ["-lstdc++"] if Path(command[0]).name in C_DRIVERS else []
        run_compiler([*command, *flags, *map(str, SOURCES), *library, "-o", own])
        ctypes.CDLL(own)  # what cannot be loaded is not put in place
        os.chmod(own, 0o755)  # sharing the folder means sharing the library
        os.replace(own, target)
    except OSError as error:
        raise Unavailable(f"the library that {command[0]} made cannot be used: {error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(own)
    return target


def run_compiler(command: list[str]) -> None:
    """Run a compiler to its end; Unavailable says what it complained about."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} was not done after {SECONDS} seconds") from error
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[:8]) or "nothing"
        raise Unavailable(f"{shlex.join(command)} failed with {done.returncode} and said: {said}")
