"""The files of an adapter's folder, read in a thread of their own and with a deadline.

A disk that hangs, or a pipe in the place of a file, would hold whoever opens it. safetensors would hold the
whole process, as it opens files with the interpreter's lock. Bytes are read without that lock, and are parsed
from memory.
"""

from __future__ import annotations

import io
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

CONFIG = "adapter_config.json"
SAFETENSORS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
STALLS = 30.0
"""Seconds without a byte after which a file counts as one that cannot be read."""
CHUNK = 16 * 2**20
"""Bytes that are read at once."""
LOOKS = 0.1
"""Seconds between looks at a thread that reads."""
T = TypeVar("T")


def done_apart(
    act: Callable[[Callable[[], None]], T], path: str, over: Callable[[], bool] = lambda: False
) -> T:
    """Do what reads a file, in a thread that no process waits for at its end.

    act: is given a function to call with each progress. over: true as soon as nobody needs the answer any
    more. Raises TimeoutError if the file gives nothing for `STALLS` seconds.
    """
    answer: Future[T] = Future()
    moments = deque([time.monotonic()], maxlen=1)
    """When there was progress last."""

    def run() -> None:
        try:
            answer.set_result(act(lambda: moments.append(time.monotonic())))
        except BaseException as error:  # the caller gets it
            answer.set_exception(error)

    threading.Thread(target=run, name="hf_paged adapter files", daemon=True).start()
    while not answer.done():
        wait([answer], LOOKS)
        if not answer.done() and over():
            raise RuntimeError(f"the engine was closed while {path} was read")
        if not answer.done() and time.monotonic() - moments[0] > STALLS:
            raise TimeoutError(
                f"{path} returned no data for {STALLS:g} s; is its disk reachable? The adapter was not loaded"
            )
    return answer.result()


def read_folder(
    folder: str, config: Any, over: Callable[[], bool] = lambda: False
) -> tuple[Mapping[str, torch.Tensor], Any]:
    """An adapter's weights and its config from a folder as peft saves it. config: in the place of the
    folder's own.
    """
    if config is None:
        path = os.path.join(folder, CONFIG)
        config = done_apart(lambda progress: _config(folder, path), path, over)
    return done_apart(lambda progress: _weights(folder, progress), folder, over), config


def require_folder(folder: str, over: Callable[[], bool] = lambda: False) -> None:
    """Raise FileNotFoundError unless this is a folder as peft saves it, on this machine."""
    path = os.path.join(folder, CONFIG)
    done_apart(lambda progress: _require(folder, path), path, over)


def _require(folder: str, path: str) -> None:
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{folder[:200]!r} is not a folder with {CONFIG} in it; give one as peft saves it"
        )


def _config(folder: str, path: str) -> Any:
    import peft

    _require(folder, path)
    _require_regular(path)
    return peft.PeftConfig.from_pretrained(folder)


def _weights(folder: str, progress: Callable[[], None]) -> Mapping[str, torch.Tensor]:
    names = [name for name in (SAFETENSORS, PICKLED) if os.path.exists(os.path.join(folder, name))]
    if not names:
        raise FileNotFoundError(
            f"{folder[:200]!r} has neither {SAFETENSORS} nor {PICKLED}; give a folder as peft saves it"
        )
    content = _read(os.path.join(folder, names[0]), progress)
    if names[0] == PICKLED:
        return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    from safetensors.torch import load

    return dict(load(bytes(content)))


def _read(path: str, progress: Callable[[], None]) -> bytearray:
    _require_regular(path)
    content = bytearray()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            content += chunk
            progress()
    return content


def _require_regular(path: str) -> None:
    """Raise for a pipe, a device or a folder, which would never end, or never begin."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is not a regular file; give a folder as peft saves it")
