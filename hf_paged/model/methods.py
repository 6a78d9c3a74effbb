"""Methods of transformers that are wrapped or called here: their parameters are checked before."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import transformers
from transformers import GenerationMixin


def check_methods(expected: Mapping[str, Sequence[str]]) -> None:
    """Raise unless these methods of GenerationMixin begin with these parameters."""
    for name, parameters in expected.items():
        method = getattr(GenerationMixin, name, None)
        found = [] if method is None else list(inspect.signature(method).parameters)[1:]
        if found[: len(parameters)] != list(parameters):
            raise ImportError(
                f"hf_paged expects GenerationMixin.{name}{tuple(parameters)} and found {tuple(found)} in "
                f"transformers {transformers.__version__}; use a transformers release from 5.9 on that "
                "hf_paged was tested with"
            )
