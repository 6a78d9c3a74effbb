"""Tensors that outlive a step are ordinary ones, also where torch's inference mode is on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def ordinary_tensors() -> AbstractContextManager[Any]:
    """Within: what is made may be written outside of inference mode too.

    This is the guard of `torch.inference_mode(False)`, which enters it in lines of Python. Ctrl-C between
    them left the guard behind, and when it was collected it put the thread's modes back to those of before.
    """
    guard: AbstractContextManager[Any] = torch._C._InferenceMode(False)
    return guard
