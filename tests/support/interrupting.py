"""Ctrl-C at the n-th place of a piece of code where the interpreter looks for signals: all of them, one after
the other.
"""

from __future__ import annotations

import ctypes
import dis
import sys
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import hf_paged

PACKAGE = str(Path(hf_paged.__file__).parent)
TORCH = str(Path(torch.__file__).parent)
OUTER = ("/generate/install.py", "/generate/call.py", "/model/switch.py", "/model/hooks.py", "/model/mla.py")
"""The files that change a model for the time of a call."""

DRIVING = tuple(f"/engine/{name}.py" for name in ("fair_lock", "engine", "background", "handle"))
"""The files that take an engine's locks."""


class _Signal:
    """`-signal` is SIGINT. An operator calls it without a line of Python, so the interpreter acts on it where
    the traced code is.
    """

    __neg__ = ctypes.PYFUNCTYPE(None)(("PyErr_SetInterrupt", ctypes.pythonapi))


SIGNAL: Any = _Signal()


class Interrupted:
    """Calls `act` with Ctrl-C at place number `at`, counted over the code of the package (of the files that
    end with `files`), and over code of torch in files that end with `torch_files`.

    The places are those where the interpreter looks for signals: at the beginning of a function, after a
    call, and where a loop goes back. `count` is how many there were, `where` it came; without `at` nothing is
    interrupted.
    """

    def __init__(
        self, at: int | None = None, files: tuple[str, ...] = ("",), torch_files: tuple[str, ...] = ()
    ) -> None:
        self.at, self.count = at, 0
        self.files, self.torch_files = files, torch_files
        self.where = "nowhere"
        self._followed: dict[str, bool] = {}

    def __call__(self, act: Callable[[], Any]) -> bool:
        """True once it came to its end."""
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 and 3.13 trace opcodes if settrace finds it so
        sys.settrace(self._enter)
        try:
            act()
        except KeyboardInterrupt as interrupt:
            walk = traceback.walk_tb(interrupt.__traceback__)
            self.where = " > ".join([f"{frame.f_code.co_name}:{line}" for frame, line in walk][-6:])
            return False
        finally:
            sys.settrace(before)
        return True

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        followed = self._followed.get(name)
        if followed is None:
            ends = self.files if name.startswith(PACKAGE) else self.torch_files
            followed = self._followed[name] = name.startswith((PACKAGE, TORCH)) and name.endswith(ends)
        if not followed:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return partial(self._trace, _places(frame.f_code))

    def _trace(self, places: frozenset[int], frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode" and frame.f_lasti in places:
            self.count += 1
            if self.count == self.at:
                -SIGNAL  # noqa: B018  # the last thing that is done here
        return frame.f_trace


@cache
def _places(code: CodeType) -> frozenset[int]:
    """The instructions after which the interpreter looks for signals."""
    return frozenset(each.offset for each in dis.get_instructions(code) if _looks(each.opname))


def _looks(name: str) -> bool:
    return name.startswith(("CALL", "RESUME")) or "JUMP_BACKWARD" in name
